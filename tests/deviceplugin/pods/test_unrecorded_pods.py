"""The cards of pods that run without an allocation record."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.pods.capacity_check import Grants
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
from tests.deviceplugin.records import read, recorded
from tests.waiting import until

CARDS = cards(2)
SLICES = {"nvidia.com/mig-1g.10gb": "1"}
RAN = {"containerStatuses": [{"name": "c", "containerID": "x", "state": {"running": {}}}]}


def rows(node: Node) -> list[dict[str, Any]]:
    annotations = (node.device() or {"metadata": {}})["metadata"].get("annotations") or {}
    found: list[dict[str, Any]] = json.loads(annotations.get(CHECKPOINTS, "[]"))
    return found


def device_ids(node: Node, uid: str) -> list[list[str]]:
    return [row["deviceIDs"] for row in rows(node) if row["podUID"] == uid]


def run_bare_pod(node: Node) -> str:
    """Run a pod whose resource no plugin has registered, so the kubelet starts it without a call. Return its UID."""
    node.create(pod("bare", container("c", 100), node="n1"))
    return str(node.runs("bare")["metadata"]["uid"])


def test_pod_that_ran_before_the_agent_registered_holds_nothing(node: Node, folder: Path) -> None:
    uid = run_bare_pod(node)
    with serving(folder / "cri.sock") as cri, node.starting():
        cri.environments[uid] = {"c": {"PATH": "/bin"}}
        until(lambda: (device_ids(node, uid), device_ids(node, UNLISTED_PODS)) == ([[]], [[]]))
        node.create(recorded(pod("whole", container("c", 100), node="n1"), {"c": 1}))
        node.runs("whole")
        assert not (folder / "cdi" / f"mgpu_{uid}_receipt").exists()


def test_pod_that_ran_before_the_agent_registered_holds_what_the_runtime_shows(node: Node, folder: Path) -> None:
    uid = run_bare_pod(node)
    with serving(folder / "cri.sock") as cri, node.starting():
        cri.environments[uid] = {"c": {"NVIDIA_VISIBLE_DEVICES": "GPU-n1-1"}}
        until(lambda: device_ids(node, uid) == [["GPU-n1-1"]])
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        assert "has insufficient capacity" in until(lambda: node.waits("q"))
        node.create(recorded(share("r", node="n1"), {"c": 0}))
        node.runs("r")


def test_pod_holds_every_card_if_the_runtime_does_not_answer(node: Node) -> None:
    uid = run_bare_pod(node)
    with node.agent():
        until(lambda: device_ids(node, uid) == [["GPU-n1-0", "GPU-n1-1"]])
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        assert "has insufficient capacity" in until(lambda: node.waits("q"))


def test_pod_that_lost_its_record_keeps_the_delivered_card(node: Node) -> None:
    """The CDI files name the card, so the runtime is not needed."""
    with node.agent():
        node.create(recorded(share("p", core=70, node="n1"), {"c": 1}))
        uid = str(node.runs("p")["metadata"]["uid"])
    annotations = dict.fromkeys(node.pod("p")["metadata"]["annotations"])
    node.api.patch(f"{PODS}/p", {"metadata": {"annotations": annotations}})
    with node.agent():
        (row,) = until(lambda: [row for row in rows(node) if row["podUID"] == uid])
        assert (row["deviceIDs"], row["share"]["core"]) == (["GPU-n1-1"], 700)
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        assert "has insufficient capacity" in until(lambda: node.waits("q"))


def test_receipt_of_a_bare_pod_is_removed(node: Node, folder: Path) -> None:
    """The receipt names every card, and would hold them all once the pod is deleted by force."""
    uid = run_bare_pod(node)
    request = read(pod("bare", container("c", 100))).request
    assert request is not None
    everything = merge_by_card(unknown_shares(request), CARDS)
    Receipts(folder / "cdi").write(Receipt(uid, uid, 30, everything))
    with serving(folder / "cri.sock") as cri, node.starting():
        cri.environments[uid] = {"c": {}}
        until(lambda: not (folder / "cdi" / f"mgpu_{uid}_receipt").exists())
        cri.running.add(uid)
        node.api.delete(f"{PODS}/bare")
        node.create(recorded(pod("whole", container("c", 100), node="n1"), {"c": 0}))
        node.runs("whole")
        assert not [row for row in rows(node) if row["resourceName"] == DELETED_POD]


def test_bare_pod_for_slices_blocks_no_start() -> None:
    bare = read({**pod("bare", {"name": "c", "resources": {"limits": SLICES, "requests": SLICES}}), "status": RAN})
    grants = Grants({})
    grants.bare = frozenset({"uid-bare"})
    mine = read(recorded(share("p"), {"c": 0}))
    assert grants.refusal(mine, [mine, bare], CARDS) is None


def test_bare_pod_for_cards_blocks_no_start() -> None:
    grants = Grants({})
    other = read({**pod("bare", container("c", 100)), "status": RAN})
    mine = read(recorded(share("p"), {"c": 0}))
    assert "held by default/bare" in str(grants.refusal(mine, [mine, other], CARDS))
    grants.bare = frozenset({"uid-bare"})
    assert grants.refusal(mine, [mine, other], CARDS) is None


def test_pod_with_unknown_slices_holds_every_card() -> None:
    raw = pod("p", {"name": "c", "resources": {"limits": SLICES, "requests": SLICES}})
    other, mine = read({**raw, "status": RAN}), read(recorded(share("q"), {"c": 0}))
    grants = Grants({("uid-p", "c"): ("MIG-1",)})
    assert "held by default/p" in str(grants.refusal(mine, [mine, other], CARDS))


class FakeRuntime:
    def __init__(self) -> None:
        self.environment: dict[str, dict[str, str]] | None = None
        self.queries = 0

    async def environments(self, uid: str) -> Mapping[str, Mapping[str, str]]:
        self.queries += 1
        if self.environment is None:
            raise RetryLater(f"no runtime for {uid}")
        return self.environment


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


def examined(raw: dict[str, Any], runtime: FakeRuntime, sliced: frozenset[str] | None = frozenset()) -> UnrecordedPods:
    pods = NodePods(load_settings(), lambda: None)
    pods.take(raw)
    unrecorded = UnrecordedPods(runtime, pods, FixedGpus(CARDS), Grants({}), NodePartitions(enabled=False))
    asyncio.run(unrecorded.update(unrecorded.pods_without_record(), (), sliced))
    return unrecorded


SLICED = pod("s", {"name": "c", "resources": {"limits": SLICES, "requests": SLICES}})


def test_pod_for_slices_is_bare_unless_the_checkpoint_lists_it(runtime: FakeRuntime) -> None:
    """Only device plugins give out slices, so the runtime is not asked."""
    ran = {**SLICED, "status": RAN}
    assert examined(ran, runtime).bare == {"uid-s"}
    given = examined(ran, runtime, frozenset({"uid-s"}))
    assert not given.bare
    assert [row.ids for row in given.possible_rows] == [("GPU-n1-0", "GPU-n1-1")]
    assert not examined(ran, runtime, None).bare, "the checkpoint cannot be read"
    assert not runtime.queries


def test_pod_whose_containers_the_runtime_does_not_list_is_not_bare(runtime: FakeRuntime) -> None:
    """It may be about to start again on the cards that it had."""
    ran = {**pod("p", container("c", 30, 1024)), "status": RAN}
    runtime.environment = {}
    assert not examined(ran, runtime).bare
    runtime.environment = {"c": {}}
    assert examined(ran, runtime).bare == {"uid-p"}
    assert not examined(ran, runtime, None).bare, "the checkpoint cannot be read"


def test_completed_init_container_need_not_be_listed(runtime: FakeRuntime) -> None:
    ended = {"name": "i", "containerID": "x", "state": {"terminated": {"exitCode": 0}}}
    raw = pod("p", container("c", 30, 1024), init=(container("i", 30, 1024),))
    runtime.environment = {"c": {}}
    assert examined({**raw, "status": {**RAN, "initContainerStatuses": [ended]}}, runtime).bare == {"uid-p"}


def test_pod_with_hundreds_of_containers_has_one_row(runtime: FakeRuntime) -> None:
    """The size of the annotation is limited, and a tenant must not fill it."""
    names = [f"c{i}" for i in range(200)]
    statuses = [{"name": name, "containerID": "x"} for name in names]
    runtime.environment = {name: {"NVIDIA_VISIBLE_DEVICES": "1"} for name in names}
    raw = pod("p", *(container(name, 1, 256) for name in names))
    (row,) = examined({**raw, "status": {"containerStatuses": statuses}}, runtime).certain_rows
    assert row.ids == ("GPU-n1-1",)
    assert row.share is not None
    assert row.share.core == 2000


def test_environment_with_more_cards_than_requested_is_ignored(runtime: FakeRuntime) -> None:
    """CUDA images have `NVIDIA_VISIBLE_DEVICES=all`, and a ConfigMap may bring any value."""
    runtime.environment = {"c": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    ran = {**pod("p", container("c", 30, 1024)), "status": RAN}
    assert examined(ran, runtime).bare == {"uid-p"}


def test_pod_is_examined_again_when_another_container_has_run(runtime: FakeRuntime) -> None:
    pods, raw = NodePods(load_settings(), lambda: None), pod("p", container("c", 30, 1024), container("d", 30, 1024))
    unrecorded = UnrecordedPods(runtime, pods, FixedGpus(CARDS), Grants({}), NodePartitions(enabled=False))
    pods.take({**raw, "status": RAN})
    assert unrecorded.has_unchecked(())
    runtime.environment = {"c": {}}
    asyncio.run(unrecorded.update(unrecorded.pods_without_record(), (), frozenset()))
    assert unrecorded.bare == {"uid-p"}
    assert not unrecorded.has_unchecked(())
    pods.take({**raw, "status": {"containerStatuses": [*RAN["containerStatuses"], {"name": "d", "containerID": "y"}]}})
    assert unrecorded.has_unchecked(())
    runtime.environment = {"c": {}, "d": {"NVIDIA_VISIBLE_DEVICES": "0"}}
    asyncio.run(unrecorded.update(unrecorded.pods_without_record(), (), frozenset()))
    assert not unrecorded.bare
    assert [row.ids for row in unrecorded.certain_rows] == [("GPU-n1-0",)]
