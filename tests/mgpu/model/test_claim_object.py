"""Reading ResourceClaims from decoded JSON: what they request, what they have, and what is invalid in them."""

from typing import Any

import pytest

from mgpu.model.claim_object import has_results, read_claim, read_stored_claim
from mgpu.model.errors import BadObject
from mgpu.model.resource_claims import REPAIR, AttributeConstraint, Consumer, DeviceRequest
from tests.scheduler.claim_objects import allocated, claim, exactly, prepared, request, result, share

GIB = 1 << 30


def requests(*rows: dict[str, Any]) -> tuple[DeviceRequest, ...]:
    return read_claim(claim("c", *rows)).requests


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(BadObject) as error:
        read_claim(raw, ("binpack",))
    return [problem.field for problem in error.value.problems]


class TestRequests:
    def test_request_states_class_count_amounts_and_selectors(self) -> None:
        selector = {"cel": {"expression": "true"}}
        assert requests(request(cores=30, memory="8Gi", count=2, selectors=[selector])) == (
            DeviceRequest("gpu", "mgpu", 2, 300, 8 * GIB, ("true",)),
        )

    def test_count_is_one_by_default(self) -> None:
        assert requests(request()) == (DeviceRequest("gpu", "mgpu", 1),)

    def test_all_devices_are_a_count_of_zero(self) -> None:
        assert requests(request(allocationMode="All"))[0].count == 0

    def test_huge_count_is_read_as_one_more_than_is_ever_allocated(self) -> None:
        assert requests(request(count=10**12))[0].count == 33

    def test_administrative_access_is_read(self) -> None:
        assert requests(request(adminAccess=True))[0].admin

    def test_alternatives_are_requests_with_both_names(self) -> None:
        alternatives = [{"name": "large", **exactly(80, "40Gi")}, {"name": "small", **exactly(10, "1Gi")}]
        found = requests({"name": "gpu", "firstAvailable": alternatives})
        assert [(one.name, one.core, one.memory) for one in found] == [
            ("gpu/large", 800, 40 * GIB),
            ("gpu/small", 100, GIB),
        ]

    @pytest.mark.parametrize(("text", "milli"), [("30", 300), ("500m", 5), ("0.5", 5), ("100", 1000), ("1n", 1)])
    def test_cores_are_percent_of_a_card_and_rounded_up(self, text: str, milli: int) -> None:
        assert requests(request(cores=text))[0].core == milli

    @pytest.mark.parametrize(("text", "amount"), [("1Gi", GIB), ("1M", 1_000_000), ("1500m", 2)])
    def test_memory_is_rounded_up_to_bytes(self, text: str, amount: int) -> None:
        assert requests(request(memory=text))[0].memory == amount

    @pytest.mark.parametrize(
        ("amounts", "whole"),
        [({}, True), ({"cores": 10}, False), ({"memory": "1Gi"}, False), ({"cores": 10, "memory": "1Gi"}, False)],
    )
    def test_request_without_amounts_is_for_whole_cards(self, amounts: dict[str, Any], whole: bool) -> None:
        assert requests(request(**amounts))[0].whole is whole

    def test_request_is_found_by_its_name(self) -> None:
        found = read_claim(claim("c", request("a"), request("b", cores=10)))
        assert found.request("b") == found.requests[1]
        assert found.request("gone") is None


class TestConstraints:
    def test_equal_and_different_attributes_are_read_in_their_order(self) -> None:
        rows = (
            {"requests": ["a", "b"], "matchAttribute": "gpu.mgpu.io/model"},
            {"distinctAttribute": "gpu.mgpu.io/uuid"},
        )
        assert read_claim(claim("c", constraints=rows)).constraints == (
            AttributeConstraint(("a", "b"), "gpu.mgpu.io/model"),
            AttributeConstraint((), "gpu.mgpu.io/uuid", distinct=True),
        )

    @pytest.mark.parametrize(
        ("names", "concerned"),
        [((), True), (("gpu",), True), (("gpu/small",), True), (("gpu/large",), False), (("other",), False)],
    )
    def test_constraint_concerns_requests_and_alternatives(self, names: tuple[str, ...], concerned: bool) -> None:
        assert AttributeConstraint(names, "gpu.mgpu.io/model").concerns("gpu/small") is concerned

    def test_annotations_constrain_the_cards(self) -> None:
        annotations = {"mgpu.io/card-models": "H200", "mgpu.io/card-policy": "binpack"}
        found = read_claim(claim(annotations=annotations), ("binpack",)).card_constraints
        assert (found.models, found.card_policy) == (("H200",), "binpack")


class TestStatus:
    def test_claim_without_allocation_has_no_node(self) -> None:
        found = read_claim(claim())
        assert (found.allocated, found.results, found.node, found.is_prepared) == (False, (), "", False)

    def test_results_have_the_position_in_the_whole_allocation(self) -> None:
        other = {**result("nic-0"), "driver": "other.example"}
        found = read_claim(allocated(claim(), other, share("card-1", share="s"))).results
        assert [(r.position, r.device, r.share_id, r.core, r.memory) for r in found] == [
            (1, "card-1", "s", 300, 8 * GIB)
        ]

    def test_allocation_of_other_drivers_counts_as_allocated(self) -> None:
        raw = allocated(claim(), {**result("nic-0"), "driver": "other.example"})
        assert (read_claim(raw).allocated, read_claim(raw).results, has_results(raw)) == (True, (), False)

    def test_results_of_mgpu_are_found_in_the_object(self) -> None:
        assert has_results(allocated(claim(), share()))
        assert not has_results(claim())
        assert not has_results(None)

    def test_users_and_the_pod_of_a_template_are_read(self) -> None:
        raw = allocated(claim(), share(), pods=("p", "q"))
        raw["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "p", "uid": "uid-p", "controller": True}]
        found = read_claim(raw)
        assert found.consumers == (Consumer("pods", "p", "uid-p"), Consumer("pods", "q", "uid-q"))
        assert found.owner == "uid-p"

    def test_owner_that_is_no_controller_is_not_the_pod_of_a_template(self) -> None:
        raw = claim()
        raw["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "p", "uid": "uid-p"}]
        assert read_claim(raw).owner == ""

    def test_repair_and_deletion_are_read(self) -> None:
        raw = claim(annotations={REPAIR: "text"})
        raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        assert (read_claim(raw).repair, read_claim(raw).deleting) == ("text", True)

    def test_claim_is_prepared_when_one_of_its_devices_was_delivered(self) -> None:
        raw = prepared(allocated(claim(), share("card-0"), share("card-1")))
        assert read_claim(raw).is_prepared
        del raw["status"]["devices"][0]
        assert read_claim(raw).is_prepared

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda row: row["conditions"][0].update(status="False"), id="not delivered"),
            pytest.param(lambda row: row["conditions"][0].update(type="Ready"), id="other condition"),
            pytest.param(lambda row: row.update(driver="other.example"), id="other driver"),
            pytest.param(lambda row: row.update(shareID="former"), id="former share"),
            pytest.param(lambda row: row.update(device="card-9"), id="other device"),
            pytest.param(lambda row: row.update(pool="n9"), id="other node"),
        ],
    )
    def test_claim_is_not_prepared_by(self, change: Any) -> None:
        raw = prepared(allocated(claim(), share()))
        change(raw["status"]["devices"][0])
        assert not read_claim(raw).is_prepared


class TestBadValues:
    @pytest.mark.parametrize(
        ("row", "field"),
        [
            (request(cores="many"), "spec.devices.requests[0].exactly.capacity.requests[cores]"),
            (request(memory="8Gib"), "spec.devices.requests[0].exactly.capacity.requests[memory]"),
            (request(count="two"), "spec.devices.requests[0].exactly.count"),
            (request(cores=-1), "spec.devices.requests[0].exactly.capacity.requests[cores]"),
            (request(memory="-1Gi"), "spec.devices.requests[0].exactly.capacity.requests[memory]"),
            (request(count=True), "spec.devices.requests[0].exactly.count"),
            (
                {"name": "gpu", "firstAvailable": [{"name": "a"}, {"name": "b", **exactly("x")}]},
                "spec.devices.requests[0].firstAvailable[1].capacity.requests[cores]",
            ),
        ],
    )
    def test_bad_request_names_its_field(self, row: dict[str, Any], field: str) -> None:
        assert problems(claim("c", row)) == [field]

    def test_bad_result_names_its_field(self) -> None:
        raw = allocated(claim(), share(), result(cores="x"))
        assert problems(raw) == ["status.allocation.devices.results[1].consumedCapacity[cores]"]

    def test_bad_annotations_are_all_named_with_the_other_problem(self) -> None:
        annotations = {"mgpu.io/card-policy": "no-such", "mgpu.io/spread-group": "-"}
        raw = claim("c", request(cores="x"), annotations=annotations)
        assert sorted(problems(raw)) == [
            "metadata.annotations[mgpu.io/card-policy]",
            "metadata.annotations[mgpu.io/spread-group]",
            "spec.devices.requests[0].exactly.capacity.requests[cores]",
        ]

    @pytest.mark.parametrize("junk", [None, 1, "x", [], [1], {"requests": "x"}, {"requests": [1, None]}])
    def test_other_types_count_as_missing(self, junk: Any) -> None:
        """The webhook gets objects that are not validated yet."""
        raw = {"metadata": {}, "spec": {"devices": junk}, "status": {"allocation": {"devices": junk}}}
        assert read_claim(raw).requests == ()
        assert read_claim({"metadata": junk, "spec": junk, "status": junk}).results == ()


class TestStoredClaims:
    """Users may write an invalid annotation at any time, also when the claim is in use."""

    def test_invalid_annotation_counts_as_absent_and_the_others_are_kept(self) -> None:
        annotations = {"mgpu.io/card-policy": "no-such", "mgpu.io/card-models": "H200", REPAIR: "text"}
        found = read_stored_claim(claim(annotations=annotations), ("binpack",))
        constraints = found.card_constraints
        assert (constraints.card_policy, constraints.models, found.repair) == ("", ("H200",), "text")

    def test_list_with_an_invalid_entry_counts_as_absent(self) -> None:
        found = read_stored_claim(claim(annotations={"mgpu.io/card-models": "H200,-"}))
        assert found.card_constraints.models == ()

    def test_group_to_share_a_card_counts_as_absent_if_it_is_also_the_one_to_spread(self) -> None:
        annotations = {"mgpu.io/spread-group": "a", "mgpu.io/same-card-group": "a"}
        constraints = read_stored_claim(claim(annotations=annotations)).card_constraints
        assert (constraints.spread is not None, constraints.same_card) == (True, None)

    def test_other_invalid_fields_are_problems(self) -> None:
        raw = claim("c", request(cores="x"), annotations={"mgpu.io/card-policy": "no-such"})
        with pytest.raises(BadObject) as error:
            read_stored_claim(raw)
        assert [problem.field for problem in error.value.problems] == [
            "spec.devices.requests[0].exactly.capacity.requests[cores]"
        ]
