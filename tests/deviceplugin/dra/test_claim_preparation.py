"""What a claim gets when the kubelet has it prepared, what it waits for, and what happens between the steps."""

import asyncio
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.delivery.visibility import Exposure
from deviceplugin.pods.capacity_check import excess
from deviceplugin.pods.identity import Refused
from mgpu.kube import Unreachable
from mgpu.model.ledger import Holding, Share
from mgpu.model.resource_claims import REPAIR
from tests.builders import GIB, container, pod
from tests.deviceplugin.dra.claims import allocation, claim, claim_pod, request, result, uid_of, using
from tests.deviceplugin.dra.rig import ClaimNode
from tests.deviceplugin.records import decided

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture
def node(folder: Path) -> ClaimNode:
    return ClaimNode(folder)


def offered(node: ClaimNode, raw: dict[str, Any], *pods: dict[str, Any]) -> None:
    """Store a claim and deliver its pods."""
    node.api.put(raw)
    node.take(*(pods or (claim_pod(),)))


def move(node: ClaimNode, card: int) -> bool:
    """Move claim `a` to another card, as the repair does."""

    def change(raw: dict[str, Any]) -> None:
        raw["status"]["allocation"] = allocation([result(card, request())])

    return node.api.move("a", change)


def holds(name: str, card: int, core: int, uid: str = "") -> Holding:
    return Holding(uid or f"uid-{name}", "default", name, "n1", "mgpu", (Share("c", card, core, GIB),))


def test_container_gets_the_card_of_the_allocation(node: ClaimNode) -> None:
    offered(node, claim(cards=[1]))
    record = node.prepare()
    expected = {VISIBLE: "GPU-n1-1", "MGPU_CARDS": "1", "MGPU_CORE_PERCENT": "30", "MGPU_MEMORY_BYTES": str(8 * GIB)}
    assert node.env(record).items() >= expected.items()
    (device,) = record.devices
    assert (device.request, device.pool, device.device) == ("gpu", "n1", "card-1")
    assert device.share_id == uid_of("gpu-1")


def test_status_says_what_was_delivered(node: ClaimNode) -> None:
    offered(node, claim(cards=[1]))
    node.prepare()
    (row,) = node.api.named("a")["status"]["devices"]
    assert (row["driver"], row["pool"], row["device"], row["shareID"]) == (
        "gpu.mgpu.io",
        "n1",
        "card-1",
        uid_of("gpu-1"),
    )
    assert row["data"] == {"uuid": "GPU-n1-1", "index": 1, "corePercent": 30, "memoryBytes": 8 * GIB}
    (condition,) = row["conditions"]
    assert (condition["type"], condition["status"]) == ("Prepared", "True")
    assert condition["reason"]
    assert condition["lastTransitionTime"]


def test_status_of_other_drivers_and_other_conditions_stay(node: ClaimNode) -> None:
    raw = claim()
    other = {"driver": "nic.example.com", "pool": "n1", "device": "nic", "conditions": []}
    raw["status"]["devices"] = [other]
    offered(node, raw)
    node.prepare()
    assert node.api.named("a")["status"]["devices"][0] == other


def test_whole_card_shows_its_total(node: ClaimNode) -> None:
    offered(node, claim("a", request(cores=None, memory=None)))
    env = node.env(node.prepare())
    assert (env["MGPU_CORE_PERCENT"], env["MGPU_MEMORY_BYTES"]) == ("100", str(80 * GIB))


def test_prepare_is_idempotent(node: ClaimNode) -> None:
    offered(node, claim())
    first = node.prepare()
    writes = node.api.writes
    assert node.prepare() == first
    assert node.api.writes == writes


def test_agent_that_restarts_gives_the_same_answer(node: ClaimNode) -> None:
    offered(node, claim())
    first = node.prepare()
    node.restart()
    assert node.claims.get(uid_of("a")) == first
    assert node.prepare() == first


def test_cdi_file_is_written_again_after_a_reboot(node: ClaimNode) -> None:
    """The folder /var/run/cdi is empty then, and the kubelet may not have the claim prepared again."""
    offered(node, claim())
    spec = node.prepare() and node.spec()
    for file in (node.folder / "cdi").iterdir():
        file.unlink()
    node.restart()
    assert node.spec() == spec


def test_unprepare_removes_everything(node: ClaimNode) -> None:
    offered(node, claim())
    node.prepare()
    node.unprepare()
    node.unprepare()
    assert node.spec() is None
    assert node.record_files() == set()
    assert node.claims.holdings() == ()


def test_claim_of_a_pod_that_is_deleted_by_force_counts_until_it_is_unprepared(node: ClaimNode) -> None:
    offered(node, claim("a", request(cores=60)))
    node.prepare()
    node.drop(claim_pod())
    node.api.remove("a")
    offered(node, claim("b", request(cores=60), pods=["q"]), claim_pod("q", claims=["b"]))
    with pytest.raises(Refused, match="insufficient capacity: core 60% requested, 40% free"):
        node.prepare("b", seconds=0)
    node.unprepare()
    node.prepare("b")


# What a claim waits for


def test_claim_waits_for_its_allocation(node: ClaimNode) -> None:
    raw = claim()
    bare = {**raw, "status": {}}
    offered(node, bare)
    assert node.env(node.prepare(meanwhile=lambda: node.api.put(raw)))[VISIBLE] == "GPU-n1-0"


def test_claim_that_is_being_repaired_waits(node: ClaimNode) -> None:
    offered(node, claim(annotations={REPAIR: "{}"}))
    with pytest.raises(Refused, match="mgpu is replacing its allocation"):
        node.prepare(seconds=0.2)
    record = node.prepare(meanwhile=lambda: node.api.put(claim(cards=[1])))
    assert node.env(record)[VISIBLE] == "GPU-n1-1"


def test_claim_that_is_being_repaired_waits_also_with_an_invalid_annotation(node: ClaimNode) -> None:
    offered(node, claim(annotations={REPAIR: "{}", "mgpu.io/card-policy": "no-such"}))
    with pytest.raises(Refused, match="mgpu is replacing its allocation"):
        node.prepare(seconds=0.2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cards": ()}, "this node has no device card-0"),
        ({"healthy": False}, r"card 0 \(GPU-n1-0\) is unhealthy"),
        ({"partitioned": {0}}, "is partitioned"),
        ({"is_resumed": False}, "have not been read yet"),
    ],
)
def test_claim_waits_for_its_card(node: ClaimNode, change: dict[str, Any], reason: str) -> None:
    good = node.cards
    offered(node, claim())
    if "healthy" in change:
        node.cards = (replace(good[0], healthy=False), good[1])
    for name, value in change.items():
        if name != "healthy":
            setattr(node, name, value)
    with pytest.raises(Refused, match=reason):
        node.prepare(seconds=0)

    def recover() -> None:
        node.cards = good
        node.partitioned = set()
        node.is_resumed = True
        node.changed.wake()

    node.prepare(meanwhile=recover)


def test_claim_waits_for_remnants(node: ClaimNode) -> None:
    offered(node, claim())
    node.remnants = (holds("", 0, 1000),)
    with pytest.raises(Refused, match="containers of a deleted pod still run on its cards"):
        node.prepare(seconds=0)
    node.prepare(meanwhile=lambda: setattr(node, "remnants", ()))


def test_claim_waits_for_a_pod_without_a_claim_that_was_granted_its_card(node: ClaimNode) -> None:
    offered(node, claim("a", request(cores=60)))
    raw = decided("q", "0", 50)
    node.take(raw)
    gpu_pod = node.pods.by_uid("uid-q")
    assert gpu_pod is not None
    node.grants.grant(gpu_pod, node.cards)
    with pytest.raises(Refused, match="insufficient capacity"):
        node.prepare(seconds=0)
    assert node.claims.holdings() == ()
    node.prepare(meanwhile=lambda: node.drop(raw))


def test_pod_without_a_claim_does_not_start_on_what_a_claim_holds(node: ClaimNode) -> None:
    offered(node, claim("a", request(cores=60)))
    node.prepare()
    node.take(decided("q", "0", 50))
    gpu_pod = node.pods.by_uid("uid-q")
    assert gpu_pod is not None
    refusal = node.grants.refusal(gpu_pod, node.pods.all(), node.cards, node.claims.holdings())
    assert refusal is not None
    assert "insufficient capacity" in refusal
    assert "default/a" in refusal


def test_record_of_a_pod_that_has_not_started_does_not_count(node: ClaimNode) -> None:
    offered(node, claim("a", request(cores=60)))
    node.take(decided("q", "0", 50))
    node.prepare()


def test_claim_of_another_node_is_refused(node: ClaimNode) -> None:
    offered(node, claim(node="n2"))
    with pytest.raises(Refused, match="allocated on n2"):
        node.prepare()


def test_claim_with_another_uid_is_refused(node: ClaimNode) -> None:
    offered(node, claim())
    with pytest.raises(Refused, match="has the UID"):
        node.prepare(uid="other")


def test_claim_waits_for_the_api_server(node: ClaimNode) -> None:
    offered(node, claim())
    node.api.failing = 503
    with pytest.raises(Refused, match="cannot be read: 503"):
        node.prepare(seconds=0)
    node.prepare(meanwhile=lambda: setattr(node.api, "failing", 0))


def test_claim_waits_for_a_pod_that_uses_it(node: ClaimNode) -> None:
    node.api.put(claim())
    with pytest.raises(Refused, match="has not delivered a pod that uses the claim"):
        node.prepare(seconds=0)
    node.prepare(meanwhile=lambda: node.take(claim_pod()))


def test_claim_of_a_group_of_pods_is_prepared_for_the_pod_that_uses_it(node: ClaimNode) -> None:
    raw = claim()
    raw["status"]["reservedFor"] = [{"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "g"}]
    offered(node, raw)
    node.prepare()


# Interleavings with the scheduler process, which replaces allocations of claims that are not prepared


def test_repair_before_the_condition_wins(node: ClaimNode) -> None:
    offered(node, claim())

    def repair() -> None:
        node.api.before_write = lambda: None
        assert move(node, 1)

    node.api.before_write = repair
    record = node.prepare()
    assert node.env(record)[VISIBLE] == "GPU-n1-1"
    assert [share.card for held in node.claims.holdings() for share in held.shares] == [1]


def test_condition_before_the_repair_wins(node: ClaimNode) -> None:
    offered(node, claim())
    moved = []
    node.api.after_write = lambda: moved.append(move(node, 1))
    assert node.env(node.prepare())[VISIBLE] == "GPU-n1-0"
    assert moved == [False]


def test_change_of_another_field_is_no_reason_to_start_over(node: ClaimNode) -> None:
    """Another pod may be added to `reservedFor` at any time."""
    offered(node, claim())

    def touch() -> None:
        node.api.before_write = lambda: None
        node.api.put(node.api.named("a"))

    node.api.before_write = touch
    node.prepare()
    assert node.api.is_prepared("a")


def test_claim_that_is_deleted_before_the_condition_holds_nothing(node: ClaimNode) -> None:
    offered(node, claim())
    node.api.before_write = lambda: node.api.remove("a")
    with pytest.raises(Refused, match="does not exist"):
        node.prepare()
    assert node.claims.holdings() == ()
    assert node.spec() is None


def test_lost_answer_to_the_condition_is_found_by_the_next_read(node: ClaimNode) -> None:
    offered(node, claim())

    def unreachable() -> None:
        node.api.after_write = lambda: None
        raise Unreachable("lost")

    node.api.after_write = unreachable
    node.prepare()
    assert node.api.writes == 1


def test_claim_that_is_unprepared_while_its_condition_is_written_is_not_delivered(node: ClaimNode) -> None:
    offered(node, claim())

    def unprepare() -> None:
        node.api.after_write = lambda: None
        node.unprepare()
        node.api.failing = 503

    node.api.after_write = unprepare
    with pytest.raises(Refused, match="was unprepared while"):
        node.prepare(seconds=0)
    assert node.claims.holdings() == ()


def test_allocation_that_replaces_a_delivered_one_leaves_the_former_cards_held(node: ClaimNode) -> None:
    """No client should do that, but a user with the rights can. Containers may still use the former card."""
    offered(node, claim())
    node.prepare()
    node.api.put(claim(cards=[1]))
    record = node.prepare()
    assert node.env(record)[VISIBLE] == "GPU-n1-1"
    (held,) = node.claims.holdings()
    assert {share.card for share in held.shares} == {0, 1}


def test_full_cards_never_hold_more_than_they_have(node: ClaimNode) -> None:
    for i in range(4):
        offered(node, claim(f"a{i}", request(cores=40), pods=[f"p{i}"]), claim_pod(f"p{i}", claims=[f"a{i}"]))
    for i in range(2):
        node.prepare(f"a{i}")
    with pytest.raises(Refused, match="insufficient capacity"):
        node.prepare("a2", seconds=0)
    held = node.claims.holdings()
    assert excess(held[0], held[1:], node.cards) is None


# What containers see


def test_container_that_references_one_request_sees_its_card(node: ClaimNode) -> None:
    raw = claim("a", request("small", 10, "1Gi"), request("large", 50, "20Gi"), cards=[0, 1])
    offered(node, raw, claim_pod("p", using("c", "a/small"), using("d", "a/large"), using("e", "a")))
    record = node.prepare()
    assert node.env(record, "small")[VISIBLE] == "GPU-n1-0"
    assert node.env(record, "large")[VISIBLE] == "GPU-n1-1"
    env = node.env(record)
    assert (env[VISIBLE], env["MGPU_CARDS"]) == ("GPU-n1-0,GPU-n1-1", "0,1")
    assert (env["MGPU_CORE_PERCENT"], env["MGPU_MEMORY_BYTES"]) == ("10", str(GIB))


def test_request_for_two_cards_shows_both(node: ClaimNode) -> None:
    wanted = request(count=2)
    raw = claim("a", wanted, cards=[0])
    raw["status"]["allocation"] = allocation([result(1, wanted), result(0, wanted)])
    offered(node, raw)
    assert node.env(node.prepare())[VISIBLE] == "GPU-n1-0,GPU-n1-1"


def test_two_requests_on_one_card_show_their_sum(node: ClaimNode) -> None:
    offered(node, claim("a", request("x", 10, "1Gi"), request("y", 20, "2Gi"), cards=[0, 0]))
    env = node.env(node.prepare())
    assert (env[VISIBLE], env["MGPU_CORE_PERCENT"], env["MGPU_MEMORY_BYTES"]) == ("GPU-n1-0", "30", str(3 * GIB))


@pytest.mark.parametrize(
    ("users", "what"),
    [
        (using("c", "a/x", "a/y"), "ResourceClaim a/x, ResourceClaim a/y"),
        (using("c", "a", "b"), "ResourceClaim a, ResourceClaim b"),
    ],
)
def test_container_with_several_references_is_refused_unless_mounts_add_up(
    folder: Path, users: dict[str, Any], what: str
) -> None:
    def prepare(node: ClaimNode) -> None:
        used = claim_pod("p", users, claims=["a", "b"])
        offered(node, claim("b", cards=[1]), used)
        offered(node, claim("a", request("x"), request("y"), cards=[0, 1]), used)
        node.prepare("b")
        node.prepare("a")

    with pytest.raises(Refused, match=f"container c of pod p uses {what}.*deviceplugin.deviceList: mounts"):
        prepare(ClaimNode(folder / "1"))
    prepare(ClaimNode(folder / "2", Exposure(mounts=True)))


def test_container_that_also_requests_gpus_without_a_claim_is_refused(node: ClaimNode) -> None:
    raw = claim_pod()
    raw["spec"]["containers"][0]["resources"] |= container("c", 10, 1024)["resources"]
    offered(node, claim(), raw)
    with pytest.raises(Refused, match="GPUs without a claim"):
        node.prepare()


def test_later_pod_of_a_delivered_claim_that_would_see_too_little_is_reported(node: ClaimNode) -> None:
    """The kubelet does not have a claim prepared again for another pod, so the agent cannot refuse it."""
    offered(node, claim("a", request("x"), request("y"), cards=[0, 1]), claim_pod("p", using("c", "a/x")))
    node.prepare()
    assert [*node.preparation.late_conflicts()] == []
    node.take(claim_pod("q", using("c", "a/x", "a/y")))
    ((user, reason),) = node.preparation.late_conflicts()
    assert user.name == "q"
    assert "container c of pod q uses ResourceClaim a/x, ResourceClaim a/y" in reason


def test_administrative_access_shows_the_card_and_holds_nothing(node: ClaimNode) -> None:
    raw = claim()
    raw["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    offered(node, raw)
    assert node.env(node.prepare())[VISIBLE] == "GPU-n1-0"
    assert node.claims.holdings() == ()


def test_mounts_of_several_results_add_up(folder: Path) -> None:
    node = ClaimNode(folder, Exposure(mounts=True))
    offered(node, claim("a", request("x"), request("y"), cards=[0, 1]))
    record = node.prepare()
    mounts = [
        mount["containerPath"]
        for device in record.devices
        for name in device.cdi
        for mount in node.edits(record, name).get("mounts", ())
    ]
    assert mounts == [f"/var/run/nvidia-container-devices/GPU-n1-{i}" for i in (0, 1)]


def test_pod_builder_is_no_gpu_pod(node: ClaimNode) -> None:
    """A pod that only uses claims is none of the other vocabularies, so it counts by its claims alone."""
    node.take(claim_pod(), pod("plain"))
    assert node.pods.all() == ()


class Tracked(dict[str, Any]):
    """An object of the API server whose end can be observed."""


def test_call_that_waits_does_not_keep_the_claim_in_memory(node: ClaimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim may have 1.5 MB, and the calls for all pods of the node may wait."""
    offered(node, claim(annotations={REPAIR: "{}"}))
    original = node.api.get
    kept: list[weakref.ref[Tracked]] = []

    def get(path: str) -> Tracked:
        raw = Tracked(original(path))
        kept.append(weakref.ref(raw))
        return raw

    async def pause(_deadline: float) -> bool:
        await asyncio.sleep(0.01)
        gc.collect()
        assert kept[-1]() is None
        node.api.put(claim())
        return True

    monkeypatch.setattr(node.api, "get", get)
    monkeypatch.setattr(node.preparation, "_pause", pause)
    node.prepare()
    assert len(kept) == 2
