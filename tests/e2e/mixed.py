"""Creates pods of all five vocabularies on three nodes, and checks them after a process was lost meanwhile.

`test_losses` uses it.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.kube import ApiError, Unreachable
from mgpu.model.slice_names import MIG, MPS
from playground import nvml_state
from playground.nodes import MGPU, NodeSpec
from tests.e2e.bench import Bench, Json, asking, share
from tests.e2e.mtgpu_bench import MTGPUPODS, PODS, Named, mtgpupod
from tests.examples import SOAK
from tests.waiting import until

_A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory": "80Gi"}
POOL, CUT, SHARED = "pool-1", "mig-1", "mps-1"
CARDS = {POOL: 8, CUT: 2, SHARED: 1}
NODES = [
    NodeSpec(POOL, [{**_A100, "count": CARDS[POOL]}], dict(MGPU)),
    NodeSpec(CUT, [{**_A100, "count": CARDS[CUT]}], dict(MGPU), partitioning=MIG),
    NodeSpec(SHARED, [{**_A100, "count": CARDS[SHARED]}], dict(MGPU), partitioning=MPS),
]
SECONDS = 120.0
"""A bound for a busy machine. An idle one needs a few seconds."""
Loss = tuple[Callable[[], object], Callable[[], object]]
"""(function that stops a process, function that starts it again)"""
_POLL_SECONDS = 0.1
_ROUNDS = 3 if SOAK else 2


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """An object to create. large: it fits on no node."""

    raw: Json
    large: bool = False

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def collection(self) -> str:
        return MTGPUPODS if self.raw["kind"] == "MtgpuPod" else PODS


def _on_pool(pod: Json) -> Json:
    return {**pod, "spec": {**pod["spec"], "nodeSelector": {"kubernetes.io/hostname": POOL}}}


def _slice(name: str, resource: str, count: int = 1) -> Json:
    own = {"name": "c", "image": "cuda", "resources": {"limits": {f"nvidia.com/{resource}": str(count)}}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [own]}}


def wanted() -> list[Wanted]:
    """Return the objects in rounds with one of every kind, so that each kind is created before and after a loss."""
    found = []
    for i in range(_ROUNDS):
        pods = [share(f"mgpu-{i}"), asking(f"gpushare-{i}", gpu_mem=16), asking(f"koordinator-{i}", gpu=25)]
        found += [Wanted(_on_pool(pod)) for pod in pods]
        found += [Wanted(_slice(f"mig-{i}", ("mig-2g.20gb", "mig-3g.40gb", "mig-1g.10gb")[i]))]
        found += [Wanted(_slice(f"mps-{i}", ("gpu-4gb", "gpu-8gb", "gpu-4gb")[i]))]
        found += [Wanted(mtgpupod(f"{gpuid}-{i}", gpuid, "0.3", POOL)) for gpuid in ("aa", "bb")]
        found += [Wanted(_on_pool(asking("whole", nvidia=1)))] if i == 0 else _large()[i - 1 :: _ROUNDS - 1]
    return found


def _large() -> list[Wanted]:
    pods = [_on_pool(share("large-share", core=10, mib=81921)), _slice("large-slices", "mig-7g.80gb", CARDS[CUT] + 1)]
    return [Wanted(raw, large=True) for raw in (*pods, mtgpupod("large-named", "cc", "0.1", POOL, gib=81))]


class Mixed:
    """Pods and MtgpuPods of a cluster that has none at first, and none after `clear`."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.cluster, self.api, self.named = bench, bench.cluster, bench.cluster.api, Named(bench)

    def create(self, one: Wanted) -> bool:
        """Return whether the API server has stored the object, now or in an attempt whose answer was lost."""
        try:
            self.api.create(one.collection, one.raw)
        except Unreachable:
            return False
        except ApiError as error:
            if error.status < 500 and error.reason != "AlreadyExists":
                raise
            return error.reason == "AlreadyExists"
        return True

    def create_all(self, losses: Sequence[Loss]) -> None:
        """Create objects before and during each loss. At the end retry those that failed, as controllers do."""
        objects, left = wanted(), []
        size = -(-len(objects) // (2 * len(losses)))
        for i, (lose, bring_back) in enumerate(losses):
            left += [one for one in objects[2 * i * size : (2 * i + 1) * size] if not self.create(one)]
            lose()
            left += [one for one in objects[(2 * i + 1) * size : (2 * i + 2) * size] if not self.create(one)]
            bring_back()
        for one in left:
            until(lambda one=one: self.create(one))  # type: ignore[misc]

    def settle(self) -> set[str]:
        """Wait until every object that fits runs, and every other one has a reason.

        Return the names of the pods that the kubelet rejected. They are created again, as their controllers would.
        """
        again: set[str] = set()
        deadline = time.monotonic() + SECONDS
        while missing := [(one, there) for one, there in self._status().items() if not _is_settled(one, there)]:
            assert time.monotonic() < deadline, missing
            for one, _ in missing:
                if self._rejected(one):
                    again.add(one.name)
                    self._create_again(one)
            time.sleep(_POLL_SECONDS)
        return again

    def _status(self) -> dict[Wanted, Json]:
        """Return object → status, {} if the object does not exist."""
        found = {
            (collection, raw["metadata"]["name"]): raw.get("status") or {}
            for collection in (PODS, MTGPUPODS)
            for raw in self.api.list(collection)[0]
        }
        return {one: found.get((one.collection, one.name), {}) for one in wanted()}

    def _get(self, path: str) -> Json:
        try:
            return self.api.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return {}

    def _rejected(self, one: Wanted) -> bool:
        status = self._get(f"{PODS}/{one.name}").get("status") or {}
        return bool(status.get("phase") == "Failed" and status.get("reason") == "UnexpectedAdmissionError")

    def _create_again(self, one: Wanted) -> None:
        self.api.delete(f"{one.collection}/{one.name}")
        until(lambda: not self._get(f"{one.collection}/{one.name}"))
        until(lambda: self.create(one))

    def check(self) -> None:
        """Check that every container ever started saw the cards of its pod's record, and that no card is held twice."""
        uids, places, groups = {}, Counter[tuple[str, str]](), dict[str, set[str]]()
        for one in wanted():
            if one.large:
                continue
            pod = self.api.get(f"{PODS}/{one.name}")
            seen, taken = self._recorded(one, pod)
            uids[pod["metadata"]["uid"]] = one.name, seen
            places.update(taken)
            groups.setdefault(_group(one), set()).update(seen)
        for name, seen, env in self._started(uids):
            assert sorted(env["NVIDIA_VISIBLE_DEVICES"].split(",")) == seen, name
        assert [place for place, times in places.items() if times > 1] == [], "no slice is given out twice"
        assert len(groups["aa"]) == len(groups["bb"]) == 1, "one GPUID, one card"
        assert groups["aa"].isdisjoint(groups["bb"])
        assert groups["shares"].isdisjoint(groups["aa"] | groups["bb"] | groups["whole"])
        assert groups["whole"].isdisjoint(groups["aa"] | groups["bb"])
        assert self.bench.within_capacity()

    def _started(self, uids: dict[str, tuple[str, list[str]]]) -> Iterator[tuple[str, list[str], Any]]:
        for kubelet in self.cluster.kubelets.values():
            for container in kubelet.runtime.containers():
                if container.uid in uids:
                    yield *uids[container.uid], container.env

    def _recorded(self, one: Wanted, pod: Json) -> tuple[list[str], list[tuple[str, str]]]:
        """Return (the devices that its container must see, the places of its slices)."""
        node, annotations = pod["spec"]["nodeName"], pod["metadata"].get("annotations") or {}
        if one.collection == MTGPUPODS:
            return [self.named.status(one.name)["BoundDeviceID"]], []
        if "mgpu.io/slices-given" not in annotations:
            (cards,) = self.bench.cards(one.name).values()
            return [f"GPU-{node}-{card}" for card in cards], []
        (given,) = json.loads(annotations["mgpu.io/slices-given"]).values()
        taken = [place for of in given.values() for place in of]
        return sorted({self._device(node, place) for place in taken}), [(node, place) for place in taken]

    def _device(self, node: str, place: str) -> str:
        """Return the UUID that a container sees of the slice at `card:start`."""
        card, _, start = place.partition(":")
        if node == SHARED:
            return f"GPU-{node}-{card}"
        instances = nvml_state.read_state(self.cluster.nvml_state(node)).cards[f"GPU-{node}-{card}"].instances
        (uuid,) = (gpu.compute[0].uuid for gpu in instances if gpu.start == int(start))
        return uuid

    def clear(self) -> None:
        """Delete everything, and check that no CDI file remains and that every card can be used again."""
        self.named.clear()
        until(lambda: not any(list((self.cluster.folder / node / "cdi").iterdir()) for node in CARDS))
        fill = [_on_pool(asking("all", nvidia=CARDS[POOL])), _slice("cut", "mig-7g.80gb", CARDS[CUT])]
        for pod in (*fill, _slice("shared", "gpu-80gb")):
            self.bench.create(pod)
        for name in ("all", "cut", "shared"):
            self.bench.runs(name, SECONDS)
        self.named.clear()


def _is_settled(one: Wanted, status: Json) -> bool:
    if not one.large:
        return bool(status.get("phase") == "Running")
    kind = "PodScheduled" if one.collection == PODS else "Bound"
    rows = [row for row in status.get("conditions") or () if (row["type"], row["status"]) == (kind, "False")]
    return any(row["message"] and row["reason"] in ("Unschedulable", "ResourceExceeded") for row in rows)


def _group(one: Wanted) -> str:
    """Return the name of the group of objects that may share cards."""
    kind = one.name.partition("-")[0]
    return "shares" if kind in ("mgpu", "gpushare", "koordinator") else kind
