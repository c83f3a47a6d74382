"""Allocations that do not fit are moved to other cards, however a repair ends and whatever happens meanwhile."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from mgpu.kube import ApiError, Unreachable
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.model.resource_claims import REPAIR, Claim, claim_path
from scheduler.claims.repair import REASON
from tests import builders as b
from tests.scheduler.claim_objects import (
    allocate,
    allocated,
    claim,
    devices,
    prepared,
    request,
    result,
    serving,
    share,
    submit,
)
from tests.scheduler.cluster.objects import core_free, record
from tests.scheduler.fake import Replica, admitted, admitted_claims

Raw = dict[str, Any]


class Ended(Exception):
    """The scheduler process has ended."""


@pytest.fixture
def replica() -> Replica:
    return serving(("n1", 2))


def on(device: str, name: str = "c", cores: int = 60, created: int = 1, **more: Any) -> Raw:
    """An allocated claim whose allocation the webhook was not called for."""
    raw = claim(name, request(cores=cores, memory="1Gi"), created=f"2026-01-0{created}T00:00:00Z", **more)
    return allocated(raw, result(device, cores=str(cores), memory="1Gi", share=f"share-{name}"), pods=(f"of-{name}",))


def put(replica: Replica, *claims: Raw) -> None:
    submit(replica.api, *claims)
    replica.deliver()


def rounds(replica: Replica, count: int = 4) -> None:
    for _ in range(count):
        replica.claim_repair.work()
        replica.deliver()


def placed(replica: Replica) -> dict[str, list[str]]:
    return {name: devices(raw) for (_, name), raw in sorted(replica.api.resourceclaims.items())}


def is_locked(replica: Replica, name: str = "c") -> bool:
    return REPAIR in replica.api.claim(name)["metadata"]["annotations"]


def before_write(replica: Replica, number: int, action: Callable[[], object]) -> None:
    """Call the action before the write with this number, counted from 1."""
    left = [number]

    def step() -> None:
        left[0] -= 1
        if left[0]:
            replica.api.between = step
        else:
            action()

    replica.api.between = step


def crash() -> None:
    raise Ended


def successor(replica: Replica) -> Replica:
    """Return a fresh replica that leads instead."""
    replica.leading = False
    replica.api.watchers.clear()
    fresh = Replica(replica.api, replica.clock)
    fresh.api.admit = admitted(fresh)
    fresh.api.admit_claim = admitted_claims(fresh)
    return fresh


class TestMove:
    def test_claim_that_overlaps_with_another_is_moved(self, replica: Replica) -> None:
        put(replica, on("card-0"), on("card-0", "d", created=2))
        rounds(replica)
        assert placed(replica) == {"c": ["card-0"], "d": ["card-1"]}
        moved = replica.api.claim("d")
        assert moved["status"]["allocation"]["devices"]["results"] == [
            result("card-1", cores="60", memory="1Gi", share="share-d")
        ]
        assert moved["status"]["reservedFor"] == [{"resource": "pods", "name": "of-d", "uid": "uid-of-d"}]
        assert not is_locked(replica, "d")
        assert core_free(replica) == [400, 400]
        assert replica.events == []

    def test_claim_that_overlaps_with_a_pod_is_moved(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 50, annotations=record("0"), node="n1"))
        put(replica, on("card-0"))
        rounds(replica)
        assert placed(replica) == {"c": ["card-1"]}

    def test_delivered_claim_stays_and_the_other_one_moves(self, replica: Replica) -> None:
        put(replica, on("card-0"), prepared(on("card-0", "d", created=2)))
        rounds(replica)
        assert placed(replica) == {"c": ["card-1"], "d": ["card-0"]}

    def test_delivered_claims_are_never_moved(self, replica: Replica) -> None:
        put(replica, prepared(on("card-0")), prepared(on("card-0", "d")))
        writes = replica.api.version
        rounds(replica)
        assert replica.api.version == writes

    def test_claim_on_an_unhealthy_card_is_moved(self, replica: Replica) -> None:
        put(replica, on("card-0"))
        cards = (Card(0, "GPU-n1-0", "A", 80 << 30, healthy=False), Card(1, "GPU-n1-1", "A", 80 << 30))
        replica.api.put("devices", write_device(Node("n1"), "", cards))
        replica.deliver()
        rounds(replica)
        assert placed(replica) == {"c": ["card-1"]}

    def test_claim_on_a_device_that_does_not_exist_is_moved(self, replica: Replica) -> None:
        put(replica, on("no-such-card"), on("card-9", "d"))
        rounds(replica)
        assert sorted(placed(replica).values()) == [["card-0"], ["card-1"]]

    def test_claim_for_a_whole_card_is_moved_with_its_consumed_capacity(self, replica: Replica) -> None:
        cards = (Card(0, "GPU-n1-0", "A", 40 << 30), Card(1, "GPU-n1-1", "A", 80 << 30))
        replica.api.put("devices", write_device(Node("n1"), "", cards))
        replica.api.put("pods", b.share("p", 50, annotations=record("0"), node="n1"))
        put(replica, allocated(claim("c", request()), result("card-0", cores="100", memory="40Gi")))
        rounds(replica)
        row = replica.api.claim("c")["status"]["allocation"]["devices"]["results"][0]
        assert row == result("card-1", cores="100", memory="80Gi")

    def test_claim_that_fits_is_left_alone(self, replica: Replica) -> None:
        put(replica, on("card-0"), on("card-1", "d"))
        writes = replica.api.version
        rounds(replica)
        assert replica.api.version == writes

    def test_first_round_moves_nothing(self, replica: Replica) -> None:
        """The watch may deliver the claim before the end of the pod that had its card."""
        put(replica, on("card-0"), on("card-0", "d"))
        writes = replica.api.version
        rounds(replica, 1)
        assert replica.api.version == writes

    def test_other_claims_of_the_node_wait_until_a_move_is_observed(self, replica: Replica) -> None:
        """Otherwise both would move, or the first one would be reported although it has its card alone.

        With the webhook, the moved claim holds only its new cards as soon as they are written.
        """
        replica.api.admit_claim = None
        put(replica, on("card-0"), on("card-0", "d", created=2))
        replica.claim_repair.work()
        replica.claim_repair.work()
        replica.claim_repair.work()
        assert placed(replica) == {"c": ["card-0"], "d": ["card-1"]}
        assert replica.events == []

    def test_moved_claim_holds_both_cards_until_the_watch_delivers_it(self, replica: Replica) -> None:
        put(replica, on("card-0"), on("card-0", "d", cores=50, created=2))
        replica.claim_repair.work()
        held = []
        before_write(replica, 2, lambda: held.append(core_free(replica)))
        replica.claim_repair.work()
        assert held == [[0, 500]]
        replica.claim_repair.work()
        rounds(replica, 2)
        assert core_free(replica) == [400, 500]

    def test_replica_that_does_not_lead_writes_nothing(self, replica: Replica) -> None:
        put(replica, on("card-0"), on("card-0", "d"))
        writes = replica.api.version
        replica.leading = False
        rounds(replica)
        assert replica.api.version == writes


class TestTime:
    """A tenant may have many claims that are never delivered, such as those of a container that the agent refuses."""

    @pytest.fixture
    def examined(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        now = 0.0
        found: list[str] = []
        suspects = replica.claim_repair._suspects
        original = suspects.fits

        def fits(one: Claim) -> bool:
            nonlocal now
            now += 0.03
            found.append(one.name)
            return original(one)

        monkeypatch.setattr(suspects, "fits", fits)
        monkeypatch.setattr(suspects, "_cpu_clock", lambda: now)
        return found

    def test_claims_that_fit_are_examined_once_while_their_node_stays_as_it_is(
        self, replica: Replica, examined: list[str]
    ) -> None:
        put(replica, *(on("card-0", f"c{i}", cores=1) for i in range(3)))
        rounds(replica, 5)
        assert sorted(examined) == ["c0", "c1", "c2"]
        put(replica, on("card-0", "c3", cores=1))
        rounds(replica, 2)
        assert len(examined) == 7

    def test_round_ends_after_some_time_and_the_next_one_continues(self, replica: Replica, examined: list[str]) -> None:
        claims = [on("card-0", f"c{i}", cores=1, created=9) for i in range(12)]
        put(replica, *claims, on("card-1", "old", cores=60), on("card-1", "older", cores=60))
        for i in range(8):
            replica.claim_repair.work()
            replica.api.put("pods", b.share("p", 1 + i, annotations=record("0"), node="n1"))
            replica.deliver()
            assert len(examined) <= 8 * (i + 1)
        assert {"old", "older"} <= set(examined)
        assert placed(replica)["old"] != placed(replica)["older"]

    def test_claims_that_nothing_can_move_do_not_keep_others_from_being_moved(
        self, replica: Replica, examined: list[str]
    ) -> None:
        """Each round began with them, and its time did not suffice for any other claim."""
        stuck = [allocated(claim(f"a{i}"), share("card-9"), pods=("p", "q")) for i in range(8)]
        put(replica, *stuck)
        rounds(replica)
        put(replica, on("card-1", "old"), on("card-1", "older"))
        rounds(replica, 6)
        assert placed(replica)["old"] != placed(replica)["older"]
        assert {f"a{i}" for i in range(8)} <= set(examined)


class TestNoMove:
    def test_annotation_that_a_user_changes_does_not_move_a_claim(self, replica: Replica) -> None:
        """Otherwise each write of a user costs four writes of mgpu."""
        put(replica, on("card-0"))
        replica.claim_repair.work()
        put(replica, on("card-0", annotations={"mgpu.io/card-uuids": "GPU-n1-1"}))
        rounds(replica)
        assert placed(replica) == {"c": ["card-0"]}

    def test_claim_that_fits_nowhere_is_reported_once(self, replica: Replica) -> None:
        put(replica, prepared(on("card-0")), prepared(on("card-1", "d")), on("card-0", "e"))
        rounds(replica, 8)
        assert [(name, reason) for name, reason, _ in replica.events] == [("e", REASON)]
        assert "core 20 percent short" in replica.events[0][2]
        replica.clock.now += 61
        rounds(replica, 3)
        assert len(replica.events) == 2

    def test_claim_of_several_pods_is_reported_and_not_moved(self, replica: Replica) -> None:
        several = on("card-0")
        several["status"]["reservedFor"] *= 2
        put(replica, several, prepared(on("card-0", "d")))
        rounds(replica)
        assert placed(replica)["c"] == ["card-0"]
        assert "several pods use it" in replica.events[0][2]

    def test_second_pod_that_the_watch_has_not_delivered_prevents_the_move(self, replica: Replica) -> None:
        put(replica, on("card-0"), prepared(on("card-0", "d")))
        replica.claim_repair.work()
        replica.api.edit_claim("c", lambda raw: raw["status"].update(reservedFor=raw["status"]["reservedFor"] * 2))
        replica.claim_repair.work()
        assert placed(replica)["c"] == ["card-0"]

    def test_claim_on_an_unknown_node_does_not_keep_others_from_repair(self, replica: Replica) -> None:
        lost = on("card-0", "a", created=3)
        lost["status"]["allocation"]["devices"]["results"][0]["pool"] = "n9"
        put(replica, lost, on("card-0"), on("card-0", "d"))
        rounds(replica)
        assert sorted(devices(replica.api.claim(name)) for name in "cd") == [["card-0"], ["card-1"]]

    def test_claim_with_an_invalid_annotation_does_not_keep_others_from_repair(self, replica: Replica) -> None:
        bad = {"mgpu.io/card-policy": "no-such"}
        put(replica, prepared(on("card-0")), on("card-0", "d", created=3, annotations=bad), on("card-0", "e"))
        rounds(replica)
        assert placed(replica)["e"] == ["card-1"]

    def test_claim_with_devices_of_several_nodes_is_reported(self, replica: Replica) -> None:
        raw = claim("c", request(cores=60, memory="1Gi", count=2))
        rows = (result("card-9", cores="60", memory="1Gi"), result("card-0", node="n2", cores="60", memory="1Gi"))
        put(replica, allocated(raw, *rows))
        rounds(replica)
        assert "several nodes" in replica.events[0][2]


class TestMeanwhile:
    def overlapping(self, replica: Replica) -> None:
        """Let the claim `d` need a move, which the next round begins."""
        put(replica, prepared(on("card-0")), on("card-0", "d"))
        replica.claim_repair.work()

    def test_claim_that_was_delivered_just_before_is_not_moved(self, replica: Replica) -> None:
        self.overlapping(replica)
        replica.api.put("resourceclaims", prepared(replica.api.claim("d")))
        replica.claim_repair.work()
        assert placed(replica)["d"] == ["card-0"]

    @pytest.mark.parametrize("write", [1, 2])
    def test_claim_that_is_delivered_before_a_write_is_not_moved(self, replica: Replica, write: int) -> None:
        self.overlapping(replica)
        before_write(replica, write, lambda: replica.api.put("resourceclaims", prepared(replica.api.claim("d"))))
        rounds(replica)
        assert placed(replica)["d"] == ["card-0"]
        assert not is_locked(replica, "d")
        assert core_free(replica) == [0, 1000]

    @pytest.mark.parametrize("write", [1, 2, 3, 4])
    def test_claim_that_is_deleted_meanwhile_holds_nothing(self, replica: Replica, write: int) -> None:
        self.overlapping(replica)
        before_write(replica, write, lambda: replica.api.remove("resourceclaims", "d"))
        rounds(replica)
        assert core_free(replica) == [400, 1000]

    @pytest.mark.parametrize("write", [1, 2, 3, 4])
    def test_claim_that_somebody_edits_meanwhile_is_moved_later(self, replica: Replica, write: int) -> None:
        self.overlapping(replica)
        before_write(
            replica, write, lambda: replica.api.edit_claim("d", lambda raw: raw["metadata"].update(labels={"a": "b"}))
        )
        rounds(replica, 8)
        assert placed(replica)["d"] == ["card-1"]
        assert not is_locked(replica, "d")
        assert core_free(replica) == [400, 400]

    @pytest.mark.parametrize("write", [1, 2, 3, 4])
    def test_answer_that_is_lost_does_not_lose_the_claim(self, replica: Replica, write: int) -> None:
        self.overlapping(replica)
        before_write(replica, write, lambda: setattr(replica.api, "lost_answers", 1))
        rounds(replica, 8)
        assert placed(replica)["d"] == ["card-1"]
        assert not is_locked(replica, "d")
        assert core_free(replica) == [400, 400]

    @pytest.mark.parametrize("write", [1, 2, 3, 4])
    def test_outage_during_a_move_is_overcome(self, replica: Replica, write: int) -> None:
        self.overlapping(replica)

        def outage() -> None:
            raise Unreachable("no answer")

        before_write(replica, write, outage)
        rounds(replica, 8)
        assert placed(replica)["d"] == ["card-1"]
        assert not is_locked(replica, "d")

    def test_claim_that_kube_scheduler_allocates_again_meanwhile_keeps_that_allocation(self, replica: Replica) -> None:
        self.overlapping(replica)
        row = result("card-1", cores="60", memory="1Gi", share="again")
        before_write(replica, 3, lambda: allocate(replica.api, "d", row))
        rounds(replica, 8)
        assert replica.api.claim("d")["status"]["allocation"]["devices"]["results"] == [row]
        assert not is_locked(replica, "d")
        assert core_free(replica) == [400, 400]

    def test_admission_may_choose_another_card_than_the_repair(self) -> None:
        """A card becomes free, or is taken, before the new allocation is written."""
        replica = serving(("n1", 3))
        put(replica, prepared(on("card-0")), on("card-0", "d"))
        replica.claim_repair.work()

        def take() -> None:
            replica.state.claims.end_move("uid-d")  # As if the move had not been known to the decision.
            submit(replica.api, claim("e", request(cores=60, memory="1Gi")))
            allocate(replica.api, "e", result("card-1", cores="60", memory="1Gi"))

        before_write(replica, 3, take)
        rounds(replica, 6)
        assert placed(replica) == {"c": ["card-0"], "d": ["card-2"], "e": ["card-1"]}
        assert core_free(replica) == [400, 400, 400]


class TestNextLeader:
    @pytest.mark.parametrize("write", [1, 2, 3, 4])
    def test_next_leader_finishes_a_repair_that_ended_before_a_write(self, replica: Replica, write: int) -> None:
        put(replica, prepared(on("card-0")), on("card-0", "d"))
        replica.claim_repair.work()
        before_write(replica, write, crash)
        with pytest.raises(Ended):
            replica.claim_repair.work()
        fresh = successor(replica)
        rounds(fresh, 6)
        assert placed(fresh) == {"c": ["card-0"], "d": ["card-1"]}
        assert not is_locked(fresh, "d")
        assert core_free(fresh) == [400, 400]
        assert fresh.api.claim("d")["status"]["reservedFor"][0]["name"] == "of-d"

    def interrupted(self, replica: Replica, text: str) -> None:
        """Put a claim without allocation that has this annotation of a repair."""
        put(replica, claim("c", request(cores=60, memory="1Gi"), annotations={REPAIR: text}))

    def test_claim_that_does_not_fit_any_more_waits_and_is_reported_once(self, replica: Replica) -> None:
        put(replica, on("card-0", "d", cores=90), on("card-1", "e", cores=90))
        self.interrupted(replica, orjson.dumps(on("card-0")["status"]).decode())
        rounds(replica, 6)
        assert [(name, reason) for name, reason, _ in replica.events] == [("c", REASON)]
        assert is_locked(replica)
        put(replica, claim("d", request(cores=90, memory="1Gi")))
        rounds(replica)
        assert placed(replica)["c"] == ["card-0"]
        assert not is_locked(replica)

    @pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"allocation": {}}', "1" * 100])
    def test_annotation_that_cannot_be_read_is_reported_once(self, replica: Replica, text: str) -> None:
        self.interrupted(replica, text)
        rounds(replica, 6)
        assert [(name, reason) for name, reason, _ in replica.events] == [("c", REASON)]
        assert placed(replica) == {"c": []}

    def test_annotation_beside_an_allocation_is_removed(self, replica: Replica) -> None:
        put(replica, on("card-0", annotations={REPAIR: "anything"}))
        rounds(replica, 1)
        assert not is_locked(replica)
        assert placed(replica) == {"c": ["card-0"]}

    def test_invalid_annotation_of_a_user_does_not_hide_an_interrupted_repair(self, replica: Replica) -> None:
        text = orjson.dumps(on("card-0")["status"]).decode()
        annotations = {REPAIR: text, "mgpu.io/card-policy": "no-such"}
        put(replica, claim("c", request(cores=60, memory="1Gi"), annotations=annotations))
        rounds(replica)
        assert [(name, reason) for name, reason, _ in replica.events] == [("c", REASON)]
        replica.api.edit_claim("c", lambda raw: raw["metadata"]["annotations"].pop("mgpu.io/card-policy"))
        replica.deliver()
        rounds(replica)
        assert placed(replica) == {"c": ["card-0"]}


def test_fake_api_refuses_to_change_an_allocation(replica: Replica) -> None:
    """The reason for the four writes."""
    put(replica, on("card-0"))
    raw = replica.api.claim("c")
    moved = allocated(raw, result("card-1", cores="60", memory="1Gi"))
    with pytest.raises(ApiError) as error:
        replica.api.replace(f"{claim_path('default', 'c')}/status", moved)
    assert error.value.status == 422
