"""Sums up the recorded use for each workload, and computes the share that each of its containers needs.

The functions are pure. A workload is what a user writes: the Deployment and not its ReplicaSets, the CronJob and not
its Jobs. Pods that no longer exist count for the workload too, since its peaks may be theirs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mgpu.model.cards import WHOLE_CORE, WHOLE_RATIO, Card
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from playground.simulate.documents import Raw
from playground.simulate.right_sizing.recorded_use import RecordedUse, Series

_MIB = 1 << 20
_PERCENT = 10
"""A percent of a card's core, in thousandths."""
_HASH = "[bcdfghjklmnpqrstvwxz2456789]"
"""A letter of the random parts of names (k8s.io/apimachinery/pkg/util/rand)."""
_SUFFIX = {
    "Deployment": rf"-{_HASH}{{1,10}}-{_HASH}{{5}}",
    "StatefulSet": r"-\d+",
    "CronJob": rf"-\d{{8,}}(-\d+)?-{_HASH}{{5}}",
}
"""What follows the name of a workload in the names of its pods. All other kinds have one random part."""
_ONE_PART = rf"(-\d+)?-{_HASH}{{5}}"
_CRON_JOB = re.compile(r"(.+)-\d{8,}")


class Owner(NamedTuple):
    """A workload, or a pod without one."""

    namespace: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.kind}/{self.name}"


class Amounts(NamedTuple):
    """What was used of one card: the median, the 99th percentile, and the most."""

    p50: int
    p99: int
    most: int


@dataclass(frozen=True, slots=True)
class Need:
    """The share of a card that the container of a workload has, has used, and needs.

    Attributes:
        container: its name, or "" if it is the only one of the workload that has cards.
        pods: the number of the workload's pods.
        cards: how many cards each has.
        core, memory: what it asks of each card, in thousandths and in bytes.
        used_core, used_memory: what was recorded; None if nothing was.
        needed_core, needed_memory: what it needs.
    """

    owner: Owner
    container: str
    pods: int
    cards: int
    core: int
    memory: int
    used_core: Amounts | None
    used_memory: Amounts | None
    needed_core: int
    needed_memory: int

    @property
    def is_recorded(self) -> bool:
        return self.used_core is not None or self.used_memory is not None


class Workload(NamedTuple):
    """A pod that can be placed again, with its request and its workload."""

    owner: Owner
    raw: Raw
    request: GpuRequest


def owner_of(raw: Raw) -> Owner:
    """Return the workload of a Pod, by its controller."""
    meta = raw["metadata"]
    namespace = str(meta.get("namespace") or "default")
    controller = next((row for row in meta.get("ownerReferences") or () if row.get("controller")), None)
    if controller is None:
        return Owner(namespace, "Pod", str(meta["name"]))
    kind, name = str(controller.get("kind")), str(controller.get("name"))
    template = (meta.get("labels") or {}).get("pod-template-hash")
    if kind == "ReplicaSet" and template and name.endswith(f"-{template}"):
        return Owner(namespace, "Deployment", name.removesuffix(f"-{template}"))
    if kind == "Job" and (found := _CRON_JOB.fullmatch(name)):
        return Owner(namespace, "CronJob", found[1])
    return Owner(namespace, kind, name)


def needs_of(workloads: Sequence[Workload], use: RecordedUse, margin: int, largest: Card) -> list[Need]:
    """Return the needs of each container of each workload, sorted.

    Args:
        margin: how much more than what was used a container needs, in percent.
        largest: the card with the most memory, which no share can exceed.
    """
    pods: dict[Owner, list[Workload]] = {}
    for workload in workloads:
        pods.setdefault(workload.owner, []).append(workload)
    existing = {(w.owner.namespace, str(w.raw["metadata"]["name"])): w.owner for w in workloads}
    memory = _by_owner(use.memory, existing)
    sm = _by_owner(use.sm, existing)
    found = []
    for owner in sorted(pods):
        containers = pods[owner][0].request.containers
        for request in containers:
            key = owner, request.container
            shown = request.container if len(containers) > 1 else ""
            used_memory, used_sm = _amounts(memory.get(key, ())), _amounts([1000 * v for v in sm.get(key, ())])
            need = _need(request, used_sm, used_memory, margin, largest)
            found.append(replace(need, owner=owner, container=shown, pods=len(pods[owner])))
    return found


def _by_owner(
    series: Mapping[Series, Sequence[float]], existing: Mapping[tuple[str, str], Owner]
) -> dict[tuple[Owner, str], list[float]]:
    """Return the values by workload and container, also those of pods that no longer exist."""
    patterns: dict[str, list[tuple[Owner, re.Pattern[str]]]] = {}
    for owner in _with_longest_names_first(existing.values()):
        form = re.compile(re.escape(owner.name) + _SUFFIX.get(owner.kind, _ONE_PART))
        patterns.setdefault(owner.namespace, []).append((owner, form))
    found: dict[tuple[Owner, str], list[float]] = {}
    for (namespace, pod, container), values in series.items():
        named = existing.get((namespace, pod))
        if named is None:
            named = next((one for one, form in patterns.get(namespace, ()) if form.fullmatch(pod)), None)
        if named is not None:
            found.setdefault((named, container), []).extend(values)
    return found


def _with_longest_names_first(owners: Iterable[Owner]) -> list[Owner]:
    """Return the workloads whose pods have other names. The name of one can be the beginning of the name of another."""
    return sorted({one for one in owners if one.kind != "Pod"}, key=lambda owner: (-len(owner.name), owner))


def _amounts(values: Iterable[float]) -> Amounts | None:
    """Return the percentiles of these values, each of which is a value that occurred; None if there are none."""
    rows = np.fromiter(values, float)
    if not len(rows):
        return None
    p50, p99 = np.quantile(rows, (0.5, 0.99), method="higher")
    return Amounts(round(p50), round(p99), round(rows.max()))


def _need(
    request: ContainerRequest, used_core: Amounts | None, used_memory: Amounts | None, margin: int, largest: Card
) -> Need:
    """Return the need of a container, without its workload.

    Memory needs the most that was used, because a program that gets less fails. Core needs the 99th percentile: with
    less, a program is slower for a moment.
    """
    asked = request.amount_on(largest)
    core, memory = asked.core, asked.memory
    # A container without a share of core is held to none.
    if used_core is not None and core:
        core = min(max(_up(used_core.p99 * (100 + margin) / 100, _PERCENT), _PERCENT), WHOLE_CORE)
    if used_memory is not None and memory:
        memory = min(max(_up(used_memory.most * (100 + margin) / 100, _MIB), _MIB), largest.memory)
    return Need(Owner("", "", ""), "", 0, request.cards, asked.core, asked.memory, used_core, used_memory, core, memory)


def _up(amount: float, step: int) -> int:
    return -int(-amount // step) * step


def resized(workload: Workload, needs: Mapping[tuple[Owner, str], Need]) -> GpuRequest:
    """Return the request of a pod with the shares that its containers need. Without recorded use, they stay."""
    request = workload.request
    only = len(request.containers) == 1
    containers = []
    for one in request.containers:
        need = needs.get((workload.owner, "" if only else one.container))
        containers.append(_resized(one, need) if need and need.is_recorded else one)
    return replace(request, containers=tuple(containers))


def _resized(request: ContainerRequest, need: Need) -> ContainerRequest:
    # A whole card is all of its memory, whatever that is. With a `ratio` of 0, the percentage follows from the memory
    # (`amount_of`).
    memory, ratio = request.memory, WHOLE_RATIO if request.whole else request.ratio
    if need.used_memory is not None:
        memory, ratio = need.needed_memory, None if ratio is None else 0
    return replace(request, core=need.needed_core, memory=memory, ratio=ratio, whole=False, is_nvidia_gpu=False)
