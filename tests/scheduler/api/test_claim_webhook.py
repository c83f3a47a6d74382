"""The admission of allocations replaces kube-scheduler's cards by those of the ledger, or denies the write."""

import json
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from mgpu.kube import ApiError
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.pods import Node
from mgpu.serving.review import parse_review
from mgpu.settings import load_settings
from tests import builders as b
from tests.scheduler.claim_objects import (
    allocate,
    allocated,
    claim,
    denial,
    device_class,
    devices,
    prepared,
    request,
    result,
    serving,
    share,
    submit,
)
from tests.scheduler.cluster.objects import record
from tests.scheduler.fake import Replica, admitted, admitted_claims, claim_review, clients

GIB = 1 << 30
WHOLE = {"cores": "100", "memory": "80Gi"}


@pytest.fixture
def replica() -> Replica:
    return serving(("n1", 2))


def test_allocation_gets_the_card_that_the_policy_prefers(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 30, annotations=record("1"), node="n1"))
    submit(replica.api, claim())
    replica.deliver()
    written = allocate(replica.api, "c", share("card-0", share="s"))
    row = written["status"]["allocation"]["devices"]["results"][0]
    assert row == {**share("card-0", share="s"), "device": "card-1"}
    assert replica.cards_held()["c"] == [(1, 300)]


def test_allocation_that_agrees_with_the_decision_is_not_patched(replica: Replica) -> None:
    submit(replica.api, claim())
    old = replica.api.claim("c")
    answer = admitted_claims(replica)(claim_review(allocated(old, share("card-0")), old))["response"]
    assert answer["allowed"]
    assert "patch" not in answer


def test_claims_and_pods_share_the_cards_without_overlap(replica: Replica) -> None:
    submit(replica.api, claim("c", request(cores=60, memory="1Gi")), claim("d", request(cores=60, memory="1Gi")))
    replica.api.put("pods", b.share("p", 40))
    replica.deliver()
    first = allocate(replica.api, "c", result("card-0", cores="60", memory="1Gi"))
    replica.api.bind("p", "n1")
    second = allocate(replica.api, "d", result("card-0", cores="60", memory="1Gi"))
    assert devices(first) == ["card-0"]
    assert devices(second) == ["card-1"]
    assert replica.cards_held() == {"c": [(0, 600)], "p": [(0, 400)], "d": [(1, 600)]}


class TestSeveralCards:
    def test_each_request_gets_its_own_cards(self, replica: Replica) -> None:
        submit(replica.api, claim("c", request("a", cores=30, memory="1Gi"), request("b", cores=90, memory="1Gi")))
        results = (result("card-0", "a", cores="30", memory="1Gi"), result("card-1", "b", cores="90", memory="1Gi"))
        written = allocate(replica.api, "c", *reversed(results))
        by_request = {r["request"]: r["device"] for r in written["status"]["allocation"]["devices"]["results"]}
        assert by_request["a"] != by_request["b"]

    def test_results_of_other_drivers_stay_as_they_are(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 90, annotations=record("0"), node="n1"))
        submit(replica.api, claim())
        replica.deliver()
        other = {**share("nic-0"), "driver": "other.example", "request": "nic"}
        written = allocate(replica.api, "c", other, share("card-0"))
        rows = written["status"]["allocation"]["devices"]["results"]
        assert rows == [other, {**share("card-0"), "device": "card-1"}]

    def test_count_of_two_gets_two_cards(self, replica: Replica) -> None:
        submit(replica.api, claim("c", request(cores=30, memory="1Gi", count=2)))
        written = allocate(
            replica.api, "c", result("card-0", cores="30", memory="1Gi"), result("card-0", cores="30", share="s")
        )
        assert devices(written) == ["card-0", "card-1"]

    def test_devices_of_several_nodes_are_denied(self, replica: Replica) -> None:
        submit(replica.api, claim("c", request(cores=30, memory="1Gi", count=2)))
        error = denial(
            replica.api,
            "c",
            result("card-0", cores="30", memory="1Gi"),
            result("card-0", node="n2", cores="30", memory="1Gi"),
        )
        assert (error.status, "of several nodes: n1, n2" in error.message) == (403, True)

    def test_attribute_constraint_holds_for_the_replaced_cards(self, replica: Replica) -> None:
        constraint = {"distinctAttribute": "gpu.mgpu.io/uuid"}
        submit(
            replica.api,
            claim(
                "c",
                request("a", cores=10, memory="1Gi"),
                request("b", cores=10, memory="1Gi"),
                constraints=(constraint,),
            ),
        )
        written = allocate(
            replica.api,
            "c",
            result("card-0", "a", cores="10", memory="1Gi"),
            result("card-1", "b", cores="10", share="s"),
        )
        assert sorted(devices(written)) == ["card-0", "card-1"]


class TestWholeCards:
    def test_consumed_capacity_is_that_of_the_decided_card(self, replica: Replica) -> None:
        small = Card(0, "GPU-n1-0", "A", 40 * GIB)
        large = Card(1, "GPU-n1-1", "B", 80 * GIB)
        replica.api.put("devices", write_device(Node("n1"), "", (small, large)))
        replica.api.put("pods", b.share("p", 10, annotations=record("0"), node="n1"))
        submit(replica.api, claim("c", request()))
        replica.deliver()
        written = allocate(replica.api, "c", result("card-0", cores="100", memory="40Gi"))
        row = written["status"]["allocation"]["devices"]["results"][0]
        assert (row["device"], row["consumedCapacity"]) == ("card-1", WHOLE)

    def test_only_cores_hold_all_memory_of_the_decided_card(self, replica: Replica) -> None:
        small = Card(0, "GPU-n1-0", "A", 40 * GIB)
        large = Card(1, "GPU-n1-1", "B", 80 * GIB)
        replica.api.put("devices", write_device(Node("n1"), "", (small, large)))
        replica.api.put("pods", b.share("p", 10, 30 << 10, annotations=record("0"), node="n1"))
        submit(replica.api, claim("c", request(cores=50)))
        replica.deliver()
        written = allocate(replica.api, "c", result("card-0", cores="50", memory="40Gi"))
        row = written["status"]["allocation"]["devices"]["results"][0]
        assert (row["device"], row["consumedCapacity"]) == ("card-1", {"cores": "50", "memory": "80Gi"})

    def test_result_without_consumed_capacity_gets_none(self, replica: Replica) -> None:
        """An extended resource on an API server without DRAConsumableCapacity."""
        replica.api.put("pods", b.share("p", 10, annotations=record("0"), node="n1"))
        submit(replica.api, claim("c", request()))
        replica.deliver()
        assert allocate(replica.api, "c", result("card-0"))["status"]["allocation"]["devices"]["results"] == [
            result("card-1")
        ]

    def test_whole_card_is_denied_while_all_cards_are_shared(self, replica: Replica) -> None:
        submit(
            replica.api,
            claim("c", request("a", cores=10, memory="1Gi"), request("b", cores=100, memory="1Gi")),
            claim("d", request()),
        )
        allocate(
            replica.api,
            "c",
            result("card-0", "a", cores="10", memory="1Gi"),
            result("card-1", "b", cores="100", memory="1Gi"),
        )
        assert denial(replica.api, "d", result("card-0", **WHOLE)).status == 403


class TestShareOfNothing:
    """kube-scheduler raises amounts of 0 to the least ones, but not for a card that is published as full."""

    @pytest.fixture
    def replica(self) -> Replica:
        return serving(("n1", 1))

    def test_it_does_not_show_the_card_of_somebody_else(self, replica: Replica) -> None:
        submit(replica.api, claim("whole", request()), claim("c", request(cores=0, memory=0)))
        allocate(replica.api, "whole", result("card-0", **WHOLE))
        assert denial(replica.api, "c", result("card-0", cores="0", memory="0")).status == 403

    def test_less_than_nothing_is_denied(self, replica: Replica) -> None:
        """The API server accepts negative amounts, and kube-scheduler allocates them on a card that is full."""
        submit(replica.api, claim("whole", request()), claim("c", request(cores=-50, memory="-8Gi")))
        allocate(replica.api, "whole", result("card-0", **WHOLE))
        assert "must not be negative" in denial(replica.api, "c", result("card-0", cores="-50", memory="-8Gi")).message
        replica.deliver()
        assert replica.cards_held() == {"whole": [(0, 1000)]}

    def test_it_is_counted(self, replica: Replica) -> None:
        submit(replica.api, claim("c", request(cores=0, memory=0)))
        allocate(replica.api, "c", result("card-0", cores="0", memory="0"))
        assert replica.cards_held() == {"c": [(0, 10)]}


class TestDenial:
    def test_message_names_what_each_card_lacks_and_the_status_is_403(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 80, annotations=record("0"), node="n1"))
        replica.api.put("pods", b.share("q", 90, annotations=record("1"), node="n1"))
        submit(replica.api, claim())
        replica.deliver()
        error = denial(replica.api, "c", share("card-0"))
        assert error.status == 403
        assert "no cards for this claim on n1" in error.message
        assert "1 core 10 percent short, 1 core 20 percent short" in error.message
        assert replica.state.reservation("uid-c") is None

    def test_unknown_node_is_denied(self, replica: Replica) -> None:
        submit(replica.api, claim())
        assert "n9 is not known" in denial(replica.api, "c", share("card-0", node="n9")).message

    def test_invalid_annotation_is_denied_with_422_and_its_field(self, replica: Replica) -> None:
        submit(replica.api, claim(annotations={"mgpu.io/card-policy": "no-such"}))
        error = denial(replica.api, "c", share("card-0"))
        assert (error.status, "metadata.annotations[mgpu.io/card-policy]" in error.message) == (422, True)

    def test_deleted_claim_is_denied(self, replica: Replica) -> None:
        submit(replica.api, claim())
        old = replica.api.claim("c")
        replica.api.remove("resourceclaims", "c")
        replica.deliver()
        answer = admitted_claims(replica)(claim_review(allocated(old, share("card-0")), old))["response"]
        assert (answer["allowed"], answer["status"]["code"]) == (False, 403)
        assert replica.state.holdings() == ()

    def test_pause_follows_when_writes_keep_failing(self, replica: Replica) -> None:
        submit(replica.api, claim())
        replica.api.refuse_allocations = True
        for _ in range(200):
            error = denial(replica.api, "c", share("card-0"))
            replica.clock.now += 1
            replica.decider.check_overdue()
            if error.status == 403:
                break
        assert "writes of this claim keep failing" in error.message


class TestOtherWrites:
    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda old: old, id="no allocation"),
            pytest.param(lambda old: allocated(old, {**share(), "driver": "other.example"}), id="other driver"),
            pytest.param(lambda old: allocated(old, {**share(), "adminAccess": True}), id="admin access"),
        ],
    )
    def test_write_without_cards_of_mgpu_is_allowed_and_holds_nothing(self, replica: Replica, change: Any) -> None:
        submit(replica.api, claim())
        old = replica.api.claim("c")
        replica.leading = False  # It does not matter who answers.
        answer = admitted_claims(replica)(claim_review(change(old), old))["response"]
        assert (answer["allowed"], "patch" in answer) == (True, False)
        assert replica.state.holdings() == ()

    def test_write_to_an_allocated_claim_is_allowed_unchanged(self, replica: Replica) -> None:
        submit(replica.api, allocated(claim(), share("card-0")))
        old = replica.api.claim("c")
        answer = admitted_claims(replica)(claim_review(prepared(old), old))["response"]
        assert (answer["allowed"], "patch" in answer) == (True, False)

    def test_write_to_the_claim_itself_is_allowed(self, replica: Replica) -> None:
        submit(replica.api, claim())
        raw = claim_review(allocated(replica.api.claim("c"), share()), replica.api.claim("c"))
        raw["request"]["subResource"] = ""
        reply = replica.claim_admission(parse_review(json.dumps(raw).encode()))
        assert (reply.allowed, replica.state.holdings()) == (True, ())


class TestRepeatedCalls:
    def test_second_call_gets_the_same_card_although_another_is_preferred_now(self, replica: Replica) -> None:
        submit(replica.api, claim())
        old = replica.api.claim("c")
        raw = claim_review(allocated(old, share("card-1")), old)
        first = admitted_claims(replica)(raw)["response"]
        replica.api.put("pods", b.share("p", 30, annotations=record("1"), node="n1"))
        replica.deliver()
        assert admitted_claims(replica)(raw)["response"] == first
        assert replica.cards_held() == {"c": [(0, 300)], "p": [(1, 300)]}

    def test_second_call_gets_the_same_card(self, replica: Replica) -> None:
        submit(replica.api, claim(), claim("d", request(cores=90, memory="1Gi")))
        old = replica.api.claim("c")
        raw = claim_review(allocated(old, share("card-1")), old)
        first = admitted_claims(replica)(raw)["response"]
        allocate(replica.api, "d", result("card-0", cores="90", memory="1Gi"))
        assert admitted_claims(replica)(raw)["response"] == first
        assert replica.cards_held() == {"c": [(0, 300)], "d": [(1, 900)]}

    def test_dry_run_is_answered_and_reserves_nothing(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 90, annotations=record("0"), node="n1"))
        submit(replica.api, claim())
        replica.deliver()
        assert devices(allocate(replica.api, "c", share("card-0"), dry_run=True)) == ["card-1"]
        assert replica.state.reservation("uid-c") is None
        assert "c" not in replica.cards_held()

    def test_other_node_gets_the_claim_when_the_first_write_has_failed(self) -> None:
        replica = serving(("n1", 1), ("n2", 1))
        submit(replica.api, claim())
        replica.api.refuse_allocations = True
        denial(replica.api, "c", share("card-0"))
        replica.api.refuse_allocations = False
        allocate(replica.api, "c", share("card-0", node="n2"))
        assert [(h.node, h.name) for h in replica.state.holdings()] == [("n2", "c")]

    def test_other_node_is_denied_when_the_first_write_has_arrived(self) -> None:
        """kube-scheduler got no answer, and the watch is late. The API server asks with an outdated object first."""
        replica = serving(("n1", 1), ("n2", 1))
        submit(replica.api, claim())
        old = replica.api.claim("c")
        allocate(replica.api, "c", share("card-0"))
        raw = claim_review(allocated(old, share("card-0", node="n2")), old)
        answer = admitted_claims(replica)(raw)["response"]
        assert "allocated on n1 already" in answer["status"]["message"]
        assert [(h.node, h.name) for h in replica.state.holdings()] == [("n1", "c")]

    def test_slow_decision_does_not_replace_one_that_was_written_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """kube-scheduler has given up the first call, and has chosen another node. The watch is late."""
        replica = serving(("n1", 1), ("n2", 1))
        submit(replica.api, claim())
        old = replica.api.claim("c")
        place = replica.claim_decider.place

        def slow(*args: Any, **named: Any) -> Any:
            monkeypatch.undo()
            allocate(replica.api, "c", share("card-0", node="n2"))
            return place(*args, **named)

        monkeypatch.setattr(replica.claim_decider, "place", slow)
        answer = admitted_claims(replica)(claim_review(allocated(old, share("card-0")), old))["response"]
        assert "allocated on n2 already" in answer["status"]["message"]
        assert [(h.node, h.name) for h in replica.state.holdings()] == [("n2", "c")]

    def test_slow_decision_does_not_move_a_reservation_that_is_written_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The API server has written the first allocation after all, which kube-scheduler had given up."""
        replica = serving(("n1", 1), ("n2", 1))
        submit(replica.api, claim())
        old = replica.api.claim("c")
        first = allocated(old, share("card-0", node="n2"))
        admitted_claims(replica)(claim_review(first, old))
        place = replica.claim_decider.place

        def slow(*args: Any, **named: Any) -> Any:
            monkeypatch.undo()
            replica.api.put("resourceclaims", first)
            return place(*args, **named)

        monkeypatch.setattr(replica.claim_decider, "place", slow)
        answer = admitted_claims(replica)(claim_review(allocated(old, share("card-0")), old))["response"]
        assert "allocated on n2 already" in answer["status"]["message"]
        assert [(h.node, h.name) for h in replica.state.holdings()] == [("n2", "c")]

    def test_other_alternative_is_denied_when_the_first_write_has_arrived(self, replica: Replica) -> None:
        """The reservation for the small alternative must not replace that for the large one, which was written."""
        alternatives = {"name": "gpu", "firstAvailable": []}
        for name, cores in (("large", "80"), ("small", "10")):
            alternatives["firstAvailable"].append(  # type: ignore[attr-defined]
                {"name": name, "deviceClassName": "mgpu", "capacity": {"requests": {"cores": cores, "memory": "1Gi"}}}
            )
        submit(replica.api, claim("c", alternatives))
        old = replica.api.claim("c")
        allocate(replica.api, "c", result("card-0", "gpu/large", cores="80", memory="1Gi"))
        late = allocated(old, result("card-0", "gpu/small", cores="10", memory="1Gi"))
        assert not admitted_claims(replica)(claim_review(late, old))["response"]["allowed"]
        assert replica.cards_held() == {"c": [(0, 800)]}

    def test_outdated_write_decides_nothing(self, replica: Replica) -> None:
        """The API server refuses it, or calls again with the present object."""
        submit(replica.api, claim())
        before = replica.api.claim("c")["metadata"]["resourceVersion"]
        replica.api.edit_claim("c", lambda raw: raw["metadata"].update(labels={"a": "b"}))
        with pytest.raises(ApiError) as error:
            allocate(replica.api, "c", share("card-0"), version=before)
        assert error.value.status == 409
        assert replica.state.holdings() == ()

    def test_write_without_a_version_counts_as_one_to_the_present_claim(self, replica: Replica) -> None:
        submit(replica.api, claim())
        allocate(replica.api, "c", share("card-0"), version="")
        reserved = replica.state.reservation("uid-c")
        assert reserved is not None
        assert reserved.version < replica.api.claim("c")["metadata"]["resourceVersion"]

    def test_call_for_a_claim_that_is_known_to_be_allocated_changes_nothing(self, replica: Replica) -> None:
        """The API server calls with an object from its cache, which is late."""
        submit(replica.api, claim())
        old = replica.api.claim("c")
        submit(replica.api, allocated(claim(), share("card-1")))
        replica.deliver()
        answer = admitted_claims(replica)(claim_review(allocated(old, share("card-0")), old))["response"]
        assert (answer["allowed"], "patch" in answer) == (True, False)
        assert replica.state.reservation("uid-c") is None
        assert replica.cards_held() == {"c": [(1, 300)]}


class TestLeadership:
    def test_replica_that_does_not_lead_asks_for_a_retry(self, replica: Replica) -> None:
        submit(replica.api, claim())
        replica.leading = False
        with pytest.raises(RetryLater):
            allocate(replica.api, "c", share("card-0"))
        assert replica.state.holdings() == ()

    def test_endpoint_answers_503_while_another_replica_leads(self, replica: Replica) -> None:
        replica = Replica(replica.api, settings=load_settings("dra: {enabled: true}"))
        submit(replica.api, claim())
        client: Client = clients(replica)[0]
        old = replica.api.claim("c")
        raw = claim_review(allocated(old, share("card-0")), old)
        reply = client.post("/claim-admission", json=raw)
        assert orjson.loads(reply.data)["response"]["allowed"]
        replica.leading = False
        assert client.post("/claim-admission", json=raw).status_code == 503


class TestAnnotations:
    @pytest.mark.parametrize(
        ("annotations", "reason"),
        [
            ({"mgpu.io/card-models": "H200"}, "not among card-models"),
            ({"mgpu.io/exclude-card-models": "A100"}, "model A100"),
        ],
    )
    def test_constraint_that_no_card_fulfills_is_denied(
        self, replica: Replica, annotations: dict[str, str], reason: str
    ) -> None:
        submit(replica.api, claim(annotations=annotations))
        error = denial(replica.api, "c", share("card-0"))
        assert (error.status, reason in error.message) == (403, True)

    def test_card_models_choose_the_card(self, replica: Replica) -> None:
        mixed = (Card(0, "GPU-n1-0", "A100", 80 * GIB), Card(1, "GPU-n1-1", "H200", 80 * GIB))
        replica.api.put("devices", write_device(Node("n1"), "", mixed))
        submit(replica.api, claim(annotations={"mgpu.io/card-models": "H200"}))
        replica.deliver()
        assert devices(allocate(replica.api, "c", share("card-0"))) == ["card-1"]

    def test_card_policy_of_the_claim_chooses_the_card(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 30, annotations=record("0"), node="n1"))
        submit(replica.api, claim(annotations={"mgpu.io/card-policy": "spread"}), claim("d"))
        replica.deliver()
        assert devices(allocate(replica.api, "d", share("card-1"))) == ["card-0"]
        assert devices(allocate(replica.api, "c", share("card-0"))) == ["card-1"]

    def test_same_card_group_of_a_pod_and_a_claim_is_on_one_card(self) -> None:
        replica = serving(("n1", 2), ("n2", 1))
        group = {"mgpu.io/same-card-group": "pair"}
        replica.api.put("pods", b.share("p", 30, annotations={**record("1"), **group}, node="n1"))
        submit(replica.api, claim(annotations=group), claim("d", annotations=group))
        replica.api.put("pods", b.share("q", 30, annotations=group))
        replica.deliver()
        assert "pair is on card 1 of n1" in denial(replica.api, "c", share("card-0", node="n2")).message
        assert devices(allocate(replica.api, "c", share("card-0"))) == ["card-1"]
        replica.api.bind("q", "n1")
        replica.deliver()
        assert replica.cards_held() == {"p": [(1, 300)], "c": [(1, 300)], "q": [(1, 300)]}
        assert denial(replica.api, "d", share("card-0")).status == 403

    def test_spread_group_of_a_pod_and_a_claim_uses_other_cards(self, replica: Replica) -> None:
        group = {"mgpu.io/spread-group": "web"}
        submit(replica.api, claim(annotations=group))
        replica.api.put("pods", b.share("p", 30, annotations=group))
        replica.deliver()
        assert devices(allocate(replica.api, "c", share("card-0"))) == ["card-0"]
        replica.api.bind("p", "n1")
        assert replica.cards_held()["p"] == [(1, 300)]


class TestSelectors:
    def put_class(self, replica: Replica, *expressions: str) -> None:
        replica.api.put("deviceclasses", device_class("mgpu", *expressions))

    def test_class_selector_limits_the_cards(self, replica: Replica) -> None:
        self.put_class(replica, 'device.driver == "gpu.mgpu.io"', 'device.attributes["gpu.mgpu.io"].index == 1')
        replica.api.put("pods", b.share("p", 80, annotations=record("1"), node="n1"))
        submit(replica.api, claim())
        replica.deliver()
        assert denial(replica.api, "c", share("card-1")).status == 403

    def test_selector_of_the_request_limits_the_cards(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 30, annotations=record("0"), node="n1"))
        selector = {"cel": {"expression": 'device.attributes["gpu.mgpu.io"].index == 1'}}
        submit(
            replica.api,
            claim("c", request(cores=30, memory="1Gi", selectors=[selector])),
            claim("d", request(cores=30, memory="1Gi")),
        )
        replica.deliver()
        assert devices(allocate(replica.api, "c", result("card-1", cores="30", memory="1Gi"))) == ["card-1"]
        assert devices(allocate(replica.api, "d", result("card-1", cores="30", memory="1Gi"))) == ["card-0"]

    def test_unknown_class_keeps_the_card_of_kube_scheduler(self, replica: Replica) -> None:
        replica.api.put("pods", b.share("p", 30, annotations=record("0"), node="n1"))
        replica.api.remove("deviceclasses", "mgpu")
        submit(replica.api, claim(), claim("d", request(cores=90, memory="1Gi")))
        replica.deliver()
        assert devices(allocate(replica.api, "c", share("card-1"))) == ["card-1"]
        assert (
            "DeviceClass is not known" in denial(replica.api, "d", result("card-0", cores="90", memory="1Gi")).message
        )

    def test_selector_that_mgpu_cannot_evaluate_keeps_the_card_of_kube_scheduler(self, replica: Replica) -> None:
        self.put_class(replica, "device.somethingNew()")
        replica.api.put("pods", b.share("p", 30, annotations=record("0"), node="n1"))
        submit(replica.api, claim(), claim("d", request(cores=90, memory="1Gi")))
        replica.deliver()
        assert devices(allocate(replica.api, "c", share("card-1"))) == ["card-1"]
        assert (
            "not chosen by kube-scheduler"
            in denial(replica.api, "d", result("card-0", cores="90", memory="1Gi")).message
        )


class TestReservation:
    def test_overdue_reservation_of_a_failed_write_is_released(self, replica: Replica) -> None:
        submit(replica.api, claim())
        replica.api.refuse_allocations = True
        denial(replica.api, "c", share("card-0"))
        replica.clock.now += 31
        replica.decider.check_overdue()
        assert replica.state.holdings() == ()

    def test_overdue_reservation_of_a_written_allocation_is_kept(self, replica: Replica) -> None:
        submit(replica.api, claim())
        allocate(replica.api, "c", share("card-0"))
        replica.clock.now += 31
        replica.decider.check_overdue()
        assert replica.cards_held() == {"c": [(0, 300)]}
        replica.deliver()
        assert replica.state.reservation("uid-c") is None
        assert replica.cards_held() == {"c": [(0, 300)]}

    def test_overdue_reservation_is_kept_while_the_api_server_does_not_answer(self, replica: Replica) -> None:
        submit(replica.api, claim())
        replica.api.refuse_allocations = True
        denial(replica.api, "c", share("card-0"))
        replica.clock.now += 31
        replica.api.reachable = False
        replica.decider.check_overdue()
        assert replica.cards_held() == {"c": [(0, 300)]}

    def test_overdue_reservation_is_released_when_another_driver_serves_the_claim(self, replica: Replica) -> None:
        """Otherwise it would be kept for as long as the claim has that allocation."""
        submit(replica.api, claim())
        replica.api.refuse_allocations = True
        denial(replica.api, "c", share("card-0"))
        submit(replica.api, allocated(claim(), {**share(), "driver": "other.example"}))
        replica.clock.now += 31
        replica.decider.check_overdue()
        assert replica.state.holdings() == ()

    def test_fresh_replica_has_the_ledger_of_the_last_one(self, replica: Replica) -> None:
        submit(replica.api, claim("c", request(cores=30, memory="1Gi")), claim("d", request()))
        allocate(replica.api, "c", result("card-1", cores="30", memory="1Gi"))
        allocate(replica.api, "d", result("card-1", **WHOLE))
        replica.deliver()
        fresh = Replica(replica.api)
        assert fresh.state.holdings() == replica.state.holdings()
        replica.api.admit = admitted(fresh)
        replica.api.admit_claim = admitted_claims(fresh)
        submit(replica.api, claim("e", request(cores=80, memory="1Gi")))
        assert denial(replica.api, "e", result("card-1", cores="80", memory="1Gi")).status == 403
