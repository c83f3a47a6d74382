"""The pods of this node, as a watch keeps them: what each asks for, what was decided, how far it has come."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from mgpu import dialects
from mgpu.model.asks import Amount, Ask, ContainerAsk, peak
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, Stage, read_pod
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.settings import Settings

log = logging.getLogger(__name__)


_NOT_YET = ("", "PodInitializing", "ContainerCreating")
_TRIED = -1


@dataclass(frozen=True, slots=True)
class GpuPod:
    """A pod of this node that asks for GPU.

    shares: its record; None: not decided yet. problem: what makes its ask or its record unreadable, "" where nothing.
    exits: name → exit code of each of its containers that ended; -1: it failed, and is to be started again.
    amounts: resource → its containers that ask for it and how much, in the order in which the kubelet allocates.
    held: resource → how much the pod occupies on its node, at its busiest moment, as the scheduler counts.
    """

    pod: Pod
    ask: Ask | None = None
    shares: tuple[Share, ...] | None = None
    problem: str = ""
    exits: Mapping[str, int] = field(default_factory=dict, hash=False)
    amounts: Mapping[str, tuple[tuple[Container, int], ...]] = field(default_factory=dict, hash=False)
    held: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def decided(self) -> bool:
        """Whether waiting longer cannot tell more: there is a record, or the pod itself is wrong."""
        return self.shares is not None or bool(self.problem)

    def container_ask(self, container: str) -> ContainerAsk | None:
        return next((c for c in (self.ask.containers if self.ask else ()) if c.container == container), None)

    def asking(self, resource: str) -> tuple[tuple[Container, int], ...]:
        return self.amounts.get(resource, ())


class NodePods:
    """Fed by a Reflector (`take`, `drop`), read from any thread. `changed` is called after every change."""

    def __init__(self, settings: Settings, changed: Callable[[], None], gone: Callable[[str], None]) -> None:
        self._settings, self._changed, self._gone = settings, changed, gone
        self._pods: dict[tuple[str, str], GpuPod] = {}
        self._ordered: tuple[GpuPod, ...] | None = None
        self._lock = threading.Lock()

    def take(self, raw: dict[str, Any]) -> None:
        known = read_gpu_pod(raw, self._settings)
        if known is None:
            return
        key = (known.pod.namespace, known.pod.name)
        with self._lock:
            before = self._pods.get(key)
            self._pods[key], self._ordered = known, None
        if before is not None and before.pod.uid != known.pod.uid:
            self._gone(before.pod.uid)
        self._changed()

    def drop(self, raw: dict[str, Any]) -> None:
        meta = raw["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        with self._lock:
            if key in self._pods and self._pods[key].pod.uid == meta["uid"]:
                del self._pods[key]
                self._ordered = None
        self._gone(meta["uid"])
        self._changed()

    def get(self, namespace: str, name: str) -> GpuPod | None:
        with self._lock:
            return self._pods.get((namespace, name))

    def by_uid(self, uid: str) -> GpuPod | None:
        return next((known for known in self.all() if known.pod.uid == uid), None)

    def all(self) -> tuple[GpuPod, ...]:
        """Oldest first, then by namespace and name."""
        with self._lock:
            if self._ordered is None:
                key = attrgetter("pod.created", "pod.namespace", "pod.name")
                self._ordered = tuple(sorted(self._pods.values(), key=key))
            return self._ordered


def read_gpu_pod(raw: Mapping[str, Any], settings: Settings) -> GpuPod | None:
    """None: the pod asks for no GPU. What is unreadable in it is its `problem`, so that its containers are refused."""
    try:
        pod = read_pod(raw)
    except BadObject as error:
        meta = raw["metadata"]
        log.warning("pod cannot be read: %s", error, extra={"pod": meta.get("uid", "")})
        return None
    amounts = _amounts(pod)
    held = {r: peak((c.stage, Amount(memory=n)) for c, n in rows).memory for r, rows in amounts.items()}
    known = GpuPod(pod, exits=_exits(raw.get("status") or {}), amounts=amounts, held=held)
    try:
        ask = dialects.read_ask(pod, settings)
        if ask is None:
            return None
        known = replace(known, ask=ask)
        return replace(known, shares=dialects.by_name(ask.dialect).read_placement(pod, ask))
    except BadObject as error:
        return replace(known, problem="; ".join(map(str, error.problems)))


def _amounts(pod: Pod) -> dict[str, tuple[tuple[Container, int], ...]]:
    found: dict[str, tuple[tuple[Container, int], ...]] = {}
    for container, resource in pod.resources():
        if amount := _amount(container, resource):
            found[resource] = (*found.get(resource, ()), (container, amount))
    return found


def _amount(container: Container, resource: str) -> int:
    asked = container.asked(resource)
    try:
        return whole_number(asked[0]) if asked else 0
    except QuantityError:
        return 0  # half a CPU; the API server takes no fraction of an extended resource


def _exits(status: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state = row.get("state") or {}
        if state.get("terminated"):
            found[row["name"]] = int(state["terminated"].get("exitCode", 0))
        elif state.get("waiting") and state["waiting"].get("reason", "") not in _NOT_YET:
            found[row["name"]] = _TRIED
    return found


def next_to_start(known: GpuPod, containers: set[str], started: set[str]) -> str | None:
    """Which of a pod's containers that have the same device ids is the one that starts now; None: wait and see.

    The kubelet gives an init container's ids to later containers again, and runs one after the other.
    started: those that were started before.
    """
    for container in known.pod.containers:
        if container.name in containers:
            exit_code = known.exits.get(container.name)
            if container.stage is not Stage.INIT or (container.name not in started and exit_code is None):
                return container.name
            if exit_code is None:
                return None
            if exit_code != 0:
                return container.name
    return None
