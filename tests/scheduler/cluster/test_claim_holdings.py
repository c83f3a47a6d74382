"""What claims hold, whatever order the events and decisions come in."""

from itertools import permutations
from typing import Any

import pytest

from mgpu.model.ledger import Share
from tests import builders as b
from tests.scheduler.claim_objects import (
    allocate,
    allocated,
    claim,
    denial,
    prepared,
    request,
    result,
    serving,
    share,
    submit,
)
from tests.scheduler.cluster.objects import core_free, given_row, report
from tests.scheduler.fake import Replica, admitted_claims, claim_review

Raw = dict[str, Any]


@pytest.fixture
def replica() -> Replica:
    return serving(("n1", 2), ("n2", 2))


def put(replica: Replica, *claims: Raw) -> None:
    submit(replica.api, *claims)
    replica.deliver()


def pending(replica: Replica, name: str = "c") -> Replica:
    """Let the write of an allocation fail, so that the claim has a reservation of card 0 of n1."""
    replica.api.refuse_allocations = True
    denial(replica.api, name, share("card-0"))
    replica.api.refuse_allocations = False
    return replica


class TestAllocation:
    def test_claim_holds_its_cards_until_it_is_deallocated(self, replica: Replica) -> None:
        put(replica, claim())
        assert core_free(replica) == [1000, 1000]
        put(replica, allocated(claim(), share("card-1")))
        assert core_free(replica) == [1000, 700]
        put(replica, prepared(allocated(claim(), share("card-1"))))
        assert core_free(replica) == [1000, 700]
        put(replica, claim())
        assert core_free(replica) == [1000, 1000]

    def test_claim_holds_its_cards_until_it_is_deleted(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-1")))
        replica.api.remove("resourceclaims", "c")
        replica.deliver()
        assert core_free(replica) == [1000, 1000]
        assert replica.state.claims.items() == ()
        assert replica.state.claims.named("default", "c") is None

    def test_claim_that_several_pods_use_counts_once(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share(), pods=("p", "q", "r")))
        assert core_free(replica) == [700, 1000]

    def test_node_keeps_its_version_when_only_the_users_of_a_claim_change(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share()))
        before = replica.state.version
        put(replica, allocated(claim(), share(), pods=("p", "q")))
        assert replica.state.version == before

    def test_end_of_an_allocation_is_published(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share()))
        replica.freed.clear()
        put(replica, allocated(claim(), share(), pods=("p", "q")))
        assert replica.freed == []
        put(replica, claim())
        assert replica.freed == ["n1"]

    def test_administrative_access_holds_nothing(self, replica: Replica) -> None:
        put(replica, allocated(claim(), {**share(), "adminAccess": True}))
        assert replica.state.holdings() == ()

    def test_invalid_annotation_of_an_allocated_claim_is_ignored(self, replica: Replica) -> None:
        """A user can write it at any time."""
        put(replica, allocated(claim(annotations={"mgpu.io/card-policy": "no-such"}), share("card-1")))
        assert core_free(replica) == [1000, 700]

    def test_claim_that_cannot_be_read_is_logged_once_for_each_reason(
        self, replica: Replica, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The API server accepts these amounts, and each change of the claim is an event."""
        for cores, note in (("-1", "a"), ("-1", "b"), ("many", "b"), ("-1", "b"), ("5", "b"), ("-1", "b")):
            put(replica, claim("c", request(cores=cores), annotations={"note": note}))
        reasons = [record.getMessage().partition("[cores]: ")[2] for record in caplog.records]
        negative = "must not be negative"
        unknown = "'many' is not a quantity such as 50, 6k or 1Gi"
        assert reasons == [negative, unknown, negative, negative]

    def test_allocation_of_another_driver_releases_the_cards(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share()))
        put(replica, allocated(claim(), {**share(), "driver": "other.example"}))
        assert replica.state.holdings() == ()
        assert replica.state.claims.get("uid-c") is None

    def test_recreated_claim_replaces_the_deleted_one(self, replica: Replica) -> None:
        put(replica, allocated(claim(uid="first"), share("card-0")))
        replica.api.remove("resourceclaims", "c")
        put(replica, allocated(claim(uid="second"), share("card-1")))
        assert [(h.uid, h.shares[0].card) for h in replica.state.holdings()] == [("second", 1)]
        found = replica.state.claims.named("default", "c")
        assert found is not None
        assert found.uid == "second"

    def test_objects_in_any_order_give_the_same_ledger(self) -> None:
        claims = [
            allocated(claim("c", request(cores=30, memory="1Gi")), result("card-0", cores="30", memory="1Gi")),
            allocated(claim("d", request()), result("card-1", cores="100", memory="80Gi")),
            allocated(claim("e"), share("card-0", node="n2")),
            claim("f"),
        ]
        found = []
        for order in permutations(claims):
            replica = serving(("n1", 2), ("n2", 2))
            put(replica, *order)
            found.append(replica.state.holdings())
        assert all(holdings == found[0] for holdings in found)

    def test_cards_that_arrive_after_the_claim_are_held(self, replica: Replica) -> None:
        device = replica.api.devices["n1"]
        replica.api.remove("devices", "n1")
        put(replica, allocated(claim(), share("card-1")))
        replica.api.put("devices", device)
        replica.deliver()
        assert core_free(replica) == [1000, 700]


class TestReservation:
    def test_event_without_allocation_keeps_the_reservation(self, replica: Replica) -> None:
        put(replica, claim())
        pending(replica)
        replica.api.edit_claim("c", lambda raw: raw["metadata"].update(labels={"a": "b"}))
        replica.deliver()
        assert core_free(replica) == [700, 1000]
        assert replica.state.reservation("uid-c") is not None

    def test_allocation_replaces_the_reservation(self, replica: Replica) -> None:
        put(replica, claim())
        pending(replica)
        put(replica, allocated(claim(), share("card-1")))
        assert replica.state.reservation("uid-c") is None
        assert core_free(replica) == [1000, 700]

    def test_older_allocation_does_not_replace_the_reservation(self, replica: Replica) -> None:
        """The claim was deallocated and is allocated again, and the watch is late with changes before that."""
        put(replica, allocated(claim(), share("card-1")))
        replica.api.edit_claim("c", lambda raw: raw["status"].update(reservedFor=[]))
        submit(replica.api, claim())
        allocate(replica.api, "c", share("card-0"))
        assert core_free(replica) == [700, 1000]
        for _ in range(2):
            replica.deliver("resourceclaims", 1)
            assert core_free(replica) == [700, 1000]
            assert replica.state.reservation("uid-c") is not None
        replica.deliver()
        assert core_free(replica) == [700, 1000]
        assert replica.state.reservation("uid-c") is None

    def test_renewed_reservation_outlasts_an_allocation_between_the_attempts(self, replica: Replica) -> None:
        """The first write failed, another one was made without the webhook and removed, and the watch saw neither."""
        put(replica, claim())
        pending(replica)
        submit(replica.api, allocated(claim(), share("card-1")))
        submit(replica.api, claim())
        allocate(replica.api, "c", share("card-0"))
        for _ in range(4):
            assert core_free(replica) == [700, 1000]
            replica.deliver("resourceclaims", 1)

    def test_call_with_an_older_claim_does_not_change_the_reservation(self, replica: Replica) -> None:
        """The API server's cache is late: it calls with the claim as it was before its last allocation."""
        submit(replica.api, claim())
        old = replica.api.claim("c")
        submit(replica.api, allocated(claim(), share("card-1")))
        submit(replica.api, claim())
        pending(replica)
        reserved = replica.state.reservation("uid-c")
        for node in ("n1", "n2"):
            late = allocated(old, share("card-1", node=node))
            assert admitted_claims(replica)(claim_review(late, old))["response"]["allowed"]
        assert replica.state.reservation("uid-c") is reserved

    def test_reservation_is_refused_when_an_allocation_arrives_during_the_decision(self, replica: Replica) -> None:
        """It concerns another node than the decision, whose version does not change."""
        put(replica, claim())
        version = replica.state.node_snapshot("n1", "uid-c").version
        pending(replica)
        reservation = replica.state.reservation("uid-c")
        assert reservation is not None
        replica.state.reservations.cancel(reservation)
        put(replica, allocated(claim(), share("card-0", node="n2")))
        version = replica.state.node_snapshot("n1", "uid-c").version
        assert not replica.state.claims.reserve(reservation, version, None)
        assert [(h.uid, h.node) for h in replica.state.holdings()] == [("uid-c", "n2")]

    def test_allocation_of_another_driver_releases_the_reservation(self, replica: Replica) -> None:
        put(replica, claim())
        pending(replica)
        put(replica, allocated(claim(), {**share(), "driver": "other.example"}))
        assert replica.state.holdings() == ()
        assert replica.state.reservation("uid-c") is None

    def test_older_allocation_of_another_driver_keeps_the_reservation(self, replica: Replica) -> None:
        put(replica, claim())
        submit(replica.api, allocated(claim(), {**share(), "driver": "other.example"}))
        submit(replica.api, claim())
        allocate(replica.api, "c", share("card-0"))
        replica.deliver("resourceclaims", 1)
        assert core_free(replica) == [700, 1000]

    def test_deletion_releases_the_reservation(self, replica: Replica) -> None:
        put(replica, claim())
        pending(replica)
        replica.api.remove("resourceclaims", "c")
        replica.deliver()
        assert replica.state.holdings() == ()
        assert replica.state.reservation("uid-c") is None


def begin_move(replica: Replica, *shares: Share, node: str = "n1", uid: str = "uid-c") -> bool:
    version = replica.state.node_snapshot(node, uid).version
    return replica.state.claims.begin_move(uid, node, shares, version)


class TestMove:
    def test_moving_claim_holds_both_its_former_and_its_new_card(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-0")))
        assert begin_move(replica, Share("gpu", 1, 300, 8 << 30))
        assert core_free(replica) == [700, 700]
        replica.state.claims.end_move("uid-c")
        assert core_free(replica) == [700, 1000]

    def test_moving_claim_counts_equal_shares_of_one_card(self, replica: Replica) -> None:
        two = request(cores=30, memory="8Gi", count=2)
        put(replica, allocated(claim("c", two), share("card-0"), share("card-0", share="other")))
        assert core_free(replica) == [400, 1000]
        assert begin_move(replica, *[Share("gpu", 1, 300, 8 << 30)] * 2)
        assert core_free(replica) == [400, 400]

    def test_moving_claim_without_allocation_holds_its_new_card(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-0")))
        begin_move(replica, Share("gpu", 1, 300, 8 << 30))
        put(replica, claim())
        assert core_free(replica) == [1000, 700]
        put(replica, allocated(claim(), share("card-1")))
        assert core_free(replica) == [1000, 700]
        replica.state.claims.end_move("uid-c")
        assert core_free(replica) == [1000, 700]

    def test_move_does_not_begin_when_the_node_has_changed(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-0")), allocated(claim("d"), share("card-1")))
        version = replica.state.node_snapshot("n1", "uid-c").version
        put(replica, claim("d"))
        assert not replica.state.claims.begin_move("uid-c", "n1", (Share("gpu", 1, 300),), version)
        assert core_free(replica) == [700, 1000]

    def test_move_does_not_begin_twice_or_beside_a_reservation(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-0")), claim("d"))
        assert begin_move(replica, Share("gpu", 1, 300))
        assert not begin_move(replica, Share("gpu", 1, 300))
        pending(replica, "d")
        assert not begin_move(replica, Share("gpu", 1, 300), uid="uid-d")

    def test_deletion_ends_a_move(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-0")))
        begin_move(replica, Share("gpu", 1, 300))
        replica.api.remove("resourceclaims", "c")
        replica.deliver()
        assert replica.state.holdings() == ()


class TestReports:
    def test_deallocated_claim_holds_what_its_node_still_reports(self, replica: Replica) -> None:
        """A pod was deleted by force, and its containers still run."""
        put(replica, allocated(claim(), share("card-0")))
        report(replica.api, given_row("uid-c"))
        replica.deliver()
        assert core_free(replica) == [700, 1000]
        put(replica, claim())
        assert core_free(replica) == [0, 1000]
        report(replica.api)
        replica.deliver()
        assert core_free(replica) == [1000, 1000]

    @pytest.mark.parametrize("is_first", [True, False])
    def test_deleted_claim_holds_what_its_node_reports_before_or_after(self, replica: Replica, is_first: bool) -> None:
        put(replica, allocated(claim(), share("card-0")))
        if is_first:
            report(replica.api, given_row("uid-c"))
            replica.deliver()
        replica.api.remove("resourceclaims", "c")
        replica.deliver()
        report(replica.api, given_row("uid-c"))
        replica.deliver()
        assert core_free(replica) == [0, 1000]

    def test_other_node_cannot_change_what_a_claim_holds(self, replica: Replica) -> None:
        put(replica, allocated(claim(), share("card-0")))
        report(replica.api, given_row("uid-c", "GPU-n2-0"), node="n2")
        replica.deliver()
        assert core_free(replica) == [700, 1000]
        assert core_free(replica, "n2") == [1000, 1000]

    def test_report_does_not_replace_a_reservation(self, replica: Replica) -> None:
        put(replica, claim())
        pending(replica)
        report(replica.api, given_row("uid-c", "GPU-n2-0"), node="n2")
        replica.deliver()
        assert core_free(replica) == [700, 1000]

    def test_cancelled_reservation_leaves_what_the_node_reports(self, replica: Replica) -> None:
        put(replica, claim())
        report(replica.api, given_row("uid-c"))
        replica.deliver()
        submit(replica.api, claim("d"))
        replica.api.refuse_allocations = True
        denial(replica.api, "c", share("card-1"))
        replica.clock.now += 31
        replica.decider.check_overdue()
        assert core_free(replica) == [0, 1000]


def test_classic_pod_is_placed_beside_claims(replica: Replica) -> None:
    put(replica, allocated(claim("c", request()), result("card-0", cores="100", memory="80Gi")))
    replica.api.put("pods", b.share("p", 50))
    replica.deliver()
    replica.api.bind("p", "n1")
    replica.deliver()
    assert replica.cards_held()["p"] == [(1, 500)]
