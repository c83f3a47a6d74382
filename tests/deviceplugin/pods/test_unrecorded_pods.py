"""A pod that runs without having been handed anything holds nothing on its node, and nothing that was handed is lost.

The kubelet starts a container whose resource no plugin has registered without asking anybody: with `nodeName` before
the agent has registered, or for a profile of slices that the node does not offer.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.pods.capacity_check import Grants
from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import Receipt, Receipts, merge_by_card
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from mgpu.model.device_checkpoints import CHECKPOINTS, DELETED_POD, UNLISTED_PODS
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import unknown_shares
from mgpu.settings import load_settings
from tests.builders import cards, container, pod, share
from tests.deviceplugin.cri import serving
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.records import recorded
from tests.waiting import until

CARDS = cards(2)
SLICES = {"nvidia.com/mig-1g.10gb": "1"}
RAN = {"containerStatuses": [{"name": "c", "containerID": "x", "state": {"running": {}}}]}


def read(raw: dict[str, Any]) -> GpuPod:
    known = read_gpu_pod(raw, load_settings())
    assert known is not None
    return known


def rows(node: Node) -> list[dict[str, Any]]:
    annotations = (node.device() or {"metadata": {}})["metadata"].get("annotations") or {}
    found: list[dict[str, Any]] = json.loads(annotations.get(CHECKPOINTS, "[]"))
    return found


def of(node: Node, uid: str) -> list[list[str]]:
    return [row["deviceIDs"] for row in rows(node) if row["podUID"] == uid]


def ghost(node: Node, name: str = "ghost", *, requests: int = 100) -> str:
    """A pod that runs because no plugin has registered what it asks for; returns its UID."""
    uid = str(node.create(pod(name, container("c", requests), node="n1"))["metadata"]["uid"])
    node.runs(name)
    return uid


def test_pod_that_ran_before_the_agent_registered_holds_nothing(node: Node, folder: Path) -> None:
    uid = ghost(node)
    with serving(folder / "cri.sock") as cri, node.starting():
        cri.environments[uid] = {"c": {"PATH": "/bin"}}
        until(lambda: (of(node, uid), of(node, UNLISTED_PODS)) == ([[]], [[]]))
        node.create(recorded(pod("whole", container("c", 100), node="n1"), {"c": 1}))
        node.runs("whole")
        assert not (folder / "cdi" / f"mgpu_{uid}_receipt").exists()


def test_pod_that_ran_before_the_agent_registered_holds_what_the_runtime_shows(node: Node, folder: Path) -> None:
    uid = ghost(node)
    with serving(folder / "cri.sock") as cri, node.starting():
        cri.environments[uid] = {"c": {"NVIDIA_VISIBLE_DEVICES": "GPU-n1-1"}}
        until(lambda: of(node, uid) == [["GPU-n1-1"]])
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        assert "has no room" in until(lambda: node.waits("q"))
        node.create(recorded(share("r", node="n1"), {"c": 0}))
        node.runs("r")


def test_pod_about_which_the_runtime_is_silent_holds_everything(node: Node) -> None:
    uid = ghost(node)
    with node.agent():
        until(lambda: of(node, uid) == [["GPU-n1-0", "GPU-n1-1"]])
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        assert "has no room" in until(lambda: node.waits("q"))


def test_pod_whose_record_is_lost_keeps_the_card_that_it_was_handed(node: Node) -> None:
    """The agent's own files say what it handed out: the runtime is not needed for that."""
    with node.agent():
        node.create(recorded(share("p", core=70, node="n1"), {"c": 1}))
        uid = str(node.runs("p")["metadata"]["uid"])
    annotations = dict.fromkeys(node.pod("p")["metadata"]["annotations"])
    node.api.patch(f"{PODS}/p", {"metadata": {"annotations": annotations}})
    with node.agent():
        (row,) = until(lambda: [row for row in rows(node) if row["podUID"] == uid])
        assert (row["deviceIDs"], row["share"]["core"]) == (["GPU-n1-1"], 700)
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        assert "has no room" in until(lambda: node.waits("q"))


def test_receipt_that_an_earlier_agent_wrote_for_a_bare_pod_is_removed(node: Node, folder: Path) -> None:
    """It names every card, and would hold them all once the pod is deleted by force."""
    uid, asked = ghost(node), read(pod("ghost", container("c", 100))).request
    assert asked is not None
    everything = merge_by_card(unknown_shares(asked), CARDS)
    Receipts(folder / "cdi").write(Receipt(uid, uid, 30, everything))
    with serving(folder / "cri.sock") as cri, node.starting():
        cri.environments[uid] = {"c": {}}
        until(lambda: not (folder / "cdi" / f"mgpu_{uid}_receipt").exists())
        cri.running.add(uid)
        node.api.delete(f"{PODS}/ghost")
        node.create(recorded(pod("whole", container("c", 100), node="n1"), {"c": 0}))
        node.runs("whole")
        assert not [row for row in rows(node) if row["resourceName"] == DELETED_POD]


def test_slices_pod_that_ran_on_a_node_without_its_profile_blocks_no_start() -> None:
    """C8 at the node: an agent that held the profile for it would refuse the pods that get the slices made later."""
    bare = read({**pod("ghost", {"name": "c", "resources": {"limits": SLICES, "requests": SLICES}}), "status": RAN})
    grants = Grants({})
    grants.bare = frozenset({"uid-ghost"})
    mine = read(recorded(share("p"), {"c": 0}))
    assert grants.refusal(mine, [mine, bare], CARDS) is None


def test_unknown_holding_is_not_kept_once_it_is_known_that_the_pod_has_nothing() -> None:
    grants = Grants({})
    other = read({**pod("ghost", container("c", 100)), "status": RAN})
    mine = read(recorded(share("p"), {"c": 0}))
    assert "held by default/ghost" in str(grants.refusal(mine, [mine, other], CARDS))
    grants.bare = frozenset({"uid-ghost"})
    assert grants.refusal(mine, [mine, other], CARDS) is None


def test_slices_that_are_cut_no_longer_hold_every_card_when_their_record_is_lost() -> None:
    raw = pod("p", {"name": "c", "resources": {"limits": SLICES, "requests": SLICES}})
    other, mine = read({**raw, "status": RAN}), read(recorded(share("q"), {"c": 0}))
    grants = Grants({("uid-p", "c"): ("MIG-1",)})
    assert "held by default/p" in str(grants.refusal(mine, [mine, other], CARDS))


class Runtime:
    def __init__(self) -> None:
        self.shown: dict[str, dict[str, str]] | None = None
        self.asked = 0

    async def environments(self, uid: str) -> Mapping[str, Mapping[str, str]]:
        self.asked += 1
        if self.shown is None:
            raise RetryLater(f"no runtime for {uid}")
        return self.shown


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def looked(raw: dict[str, Any], runtime: Runtime, sliced: frozenset[str] | None = frozenset()) -> UnrecordedPods:
    pods = NodePods(load_settings(), lambda: None)
    pods.take(raw)
    unrecorded = UnrecordedPods(runtime, pods, FixedGpus(CARDS), Grants({}), NodePartitions(enabled=False))
    asyncio.run(unrecorded.update(unrecorded.pods_without_record(), (), sliced))
    return unrecorded


SLICED = pod("s", {"name": "c", "resources": {"limits": SLICES, "requests": SLICES}})


def test_pod_for_slices_is_bare_unless_the_checkpoint_says_otherwise(runtime: Runtime) -> None:
    """Slices are given out by device plugins alone, so that the runtime need not be asked."""
    ran = {**SLICED, "status": RAN}
    assert looked(ran, runtime).bare == {"uid-s"}
    given = looked(ran, runtime, frozenset({"uid-s"}))
    assert not given.bare
    assert [row.ids for row in given.possible_rows] == [("GPU-n1-0", "GPU-n1-1")]
    assert not looked(ran, runtime, None).bare, "the checkpoint cannot be read"
    assert not runtime.asked


def test_pod_of_which_the_runtime_knows_no_container_is_not_bare(runtime: Runtime) -> None:
    """It may be about to start again on the cards that it had."""
    ran = {**pod("p", container("c", 30, 1024)), "status": RAN}
    runtime.shown = {}
    assert not looked(ran, runtime).bare
    runtime.shown = {"c": {}}
    assert looked(ran, runtime).bare == {"uid-p"}
    assert not looked(ran, runtime, None).bare, "nobody knows what the kubelet gave it"


def test_pod_of_which_an_init_container_has_ended_is_bare_without_it(runtime: Runtime) -> None:
    ended = {"name": "i", "containerID": "x", "state": {"terminated": {"exitCode": 0}}}
    raw = pod("p", container("c", 30, 1024), init=(container("i", 30, 1024),))
    runtime.shown = {"c": {}}
    assert looked({**raw, "status": {**RAN, "initContainerStatuses": [ended]}}, runtime).bare == {"uid-p"}


def test_pod_with_hundreds_of_containers_has_one_row_for_what_they_hold_together(runtime: Runtime) -> None:
    """The list of a node is bounded; a tenant who fills it keeps the scheduler from hearing of anything new."""
    names = [f"c{i}" for i in range(200)]
    statuses = [{"name": name, "containerID": "x"} for name in names]
    runtime.shown = {name: {"NVIDIA_VISIBLE_DEVICES": "1"} for name in names}
    raw = pod("p", *(container(name, 1, 256) for name in names))
    (row,) = looked({**raw, "status": {"containerStatuses": statuses}}, runtime).certain_rows
    assert row.ids == ("GPU-n1-1",)
    assert row.share is not None
    assert row.share.core == 2000


def test_container_with_more_cards_in_its_environment_than_requested_was_not_handed_them(runtime: Runtime) -> None:
    """CUDA images have `NVIDIA_VISIBLE_DEVICES=all`, and a ConfigMap may bring any value."""
    runtime.shown = {"c": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    ran = {**pod("p", container("c", 30, 1024)), "status": RAN}
    assert looked(ran, runtime).bare == {"uid-p"}


def test_container_that_runs_later_is_asked_about_too(runtime: Runtime) -> None:
    pods, raw = NodePods(load_settings(), lambda: None), pod("p", container("c", 30, 1024), container("d", 30, 1024))
    unrecorded = UnrecordedPods(runtime, pods, FixedGpus(CARDS), Grants({}), NodePartitions(enabled=False))
    pods.take({**raw, "status": RAN})
    assert unrecorded.has_unchecked(())
    runtime.shown = {"c": {}}
    asyncio.run(unrecorded.update(unrecorded.pods_without_record(), (), frozenset()))
    assert unrecorded.bare == {"uid-p"}
    assert not unrecorded.has_unchecked(())
    pods.take({**raw, "status": {"containerStatuses": [*RAN["containerStatuses"], {"name": "d", "containerID": "y"}]}})
    assert unrecorded.has_unchecked(())
    runtime.shown = {"c": {}, "d": {"NVIDIA_VISIBLE_DEVICES": "0"}}
    asyncio.run(unrecorded.update(unrecorded.pods_without_record(), (), frozenset()))
    assert not unrecorded.bare
    assert [row.ids for row in unrecorded.certain_rows] == [("GPU-n1-0",)]
