"""Whatever came before and in whatever order: what is held follows from the objects that there are now."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.examples import examples
from tests.scheduler.fake import SETTINGS

Raw = dict[str, Any]
History = tuple[str, tuple[Raw | None, ...]]
"""A kind, and an object of it as it was at one time after the other; None: it was gone."""

UUIDS = ["GPU-n1-0", "GPU-n1-1", "GPU-gone"]
gpuids, phases = st.sampled_from(["x", "y"]), st.sampled_from(["Pending", "Running", "Running", "Succeeded"])
WITH_UID = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "controller": True}


@st.composite
def mtgpupods(draw: st.DrawFn, name: str) -> Raw:
    raw = b.mtgpupod(name, draw(gpuids), draw(st.sampled_from(["0.2", "0.7", "half"])), phase=draw(phases))
    raw["status"]["BoundDeviceID"] = draw(st.sampled_from(["", *UUIDS]))
    raw["status"]["PodObjectMeta"] = {"uid": draw(st.sampled_from(["uid-own-a", "uid-own-b", ""]))}
    return raw


@st.composite
def own_pods(draw: st.DrawFn, name: str) -> Raw:
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": draw(st.sampled_from(UUIDS))}]
    said = b.mtgpupod("m", draw(gpuids))["metadata"]["annotations"] if draw(st.booleans()) else {}
    uid, owner = f"uid-own-{name}", draw(st.sampled_from(["", "uid-a", "uid-b"]))
    raw = b.pod(name, b.container(env=env), annotations=said, node="n1", uid=uid, phase=draw(phases))
    raw["metadata"]["ownerReferences"] = [{**WITH_UID, "uid": owner}] if owner else []
    return raw


@st.composite
def occupy_pods(draw: st.DrawFn, gpuid: str) -> Raw:
    raw = b.occupy_pod(gpuid, card=draw(st.sampled_from([None, 0, 1])), phase=draw(phases))
    if draw(st.booleans()):
        raw["metadata"]["labels"] = {}
    return raw


@st.composite
def devices(draw: st.DrawFn) -> Raw:
    raw = write_device(Node("n1"), "", b.cards(draw(st.sampled_from([2, 2, 1]))))
    rows = [
        {
            "podUID": f"uid-mtgpupod-occupypod-n1-{gpuid}",
            "containerName": "occupy",
            "resourceName": "nvidia.com/gpu",
            "deviceIDs": [draw(st.sampled_from(UUIDS))],
        }
        for gpuid in draw(st.sampled_from(["", "x", "xy"]))
    ]
    raw["metadata"]["annotations"] = {"node.koordinator.sh/devices-checkpoints": json.dumps(rows)}
    return raw


def shares(name: str) -> st.SearchStrategy[Raw]:
    card = st.sampled_from([{"vke.volcengine.com/gpu-index-container-c": i} for i in "01"])
    return st.builds(lambda said, phase: b.share(name, annotations=said, node="n1", phase=phase), card, phases)


nodes = st.sampled_from([{}, {"mgpu.io/whole-cards": "nvidia"}]).map(lambda labels: b.node("n1", labels=labels))


def history(kind: str, objects: st.SearchStrategy[Raw], *, stays: bool = False) -> st.SearchStrategy[History]:
    once = objects if stays else st.none() | objects
    return st.lists(once, max_size=4, min_size=1).map(lambda steps: (kind, tuple(steps)))


histories = st.tuples(
    history("node", nodes, stays=True),
    history("device", devices(), stays=True),  # once it is gone, what it said is held on
    *(history("mtgpupod", mtgpupods(name)) for name in "ab"),
    *(history("pod", own_pods(name)) for name in "ab"),
    *(history("pod", occupy_pods(gpuid)) for gpuid in "xy"),
    history("pod", shares("p")),
)


def feed(state: ClusterCache, kind: str, before: Raw | None, now: Raw | None) -> None:
    cache = state.mtgpupods if kind == "mtgpupod" else state
    if now is not None:
        getattr(cache, f"{kind}_changed")(copy.deepcopy(now))
    elif before is not None:
        getattr(cache, f"{kind}_gone")(copy.deepcopy(before))


def shown(state: ClusterCache) -> object:
    seen, view = state.mtgpupods.snapshot("n1").node, state.node_snapshot("n1", "")
    return state.holdings(), replace(seen, version=0), replace(view, version=0)


@given(histories, st.lists(st.integers(0, 8), max_size=40), st.permutations(range(9)))
@examples(20)
def test_property_the_order_of_events_makes_no_difference(
    histories: Sequence[History], order: list[int], then: list[int]
) -> None:
    state, fresh = ClusterCache(SETTINGS), ClusterCache(SETTINGS)
    at = [0] * len(histories)
    for i in [*order, *(i for i in then for _ in range(4))]:
        kind, steps = histories[i]
        if at[i] < len(steps):
            feed(state, kind, steps[at[i] - 1] if at[i] else None, steps[at[i]])
            at[i] += 1
    for kind, steps in histories:
        feed(fresh, kind, None, steps[-1])
    assert shown(state) == shown(fresh)
