"""What ResourceClaims request of the cards, and what they hold. `test_claim_object` reads them."""

from typing import Any

import pytest

from mgpu.model.cards import WHOLE_CORE, WHOLE_RATIO
from mgpu.model.claim_object import read_claim
from mgpu.model.gpu_requests import ContainerRequest
from mgpu.model.ledger import Share
from mgpu.model.resource_claims import (
    DRA,
    Claim,
    card_index,
    claim_holding,
    claim_path,
    consumed_capacity,
    device_name,
    gpu_request,
    is_newer,
    requests_before_allocation,
)
from tests import builders as b
from tests.scheduler.claim_objects import allocated, claim, exactly, request, result, share

GIB = 1 << 30


def containers(raw: dict[str, Any]) -> tuple[ContainerRequest, ...]:
    found = gpu_request(read_claim(raw))
    assert found.dialect == DRA
    return found.containers


class TestGpuRequest:
    def test_share_has_the_consumed_amounts(self) -> None:
        assert containers(allocated(claim(), share())) == (ContainerRequest("gpu", 1, 300, 8 * GIB),)

    def test_consumed_amounts_count_and_not_the_requested_ones(self) -> None:
        """kube-scheduler rounds them up to a step."""
        raw = allocated(claim("c", request(cores="29500m", memory="1")), result(cores="30", memory="1Mi"))
        assert containers(raw) == (ContainerRequest("gpu", 1, 300, 1 << 20),)

    def test_request_without_amounts_is_for_a_whole_card_of_any_size(self) -> None:
        raw = allocated(claim("c", request()), result(cores="100", memory="40Gi"))
        assert containers(raw) == (ContainerRequest("gpu", 1, WHOLE_CORE, whole=True),)

    def test_only_cores_take_all_memory(self) -> None:
        raw = allocated(claim("c", request(cores=50)), result(cores="50", memory="80Gi"))
        assert containers(raw) == (ContainerRequest("gpu", 1, 500, 0, ratio=WHOLE_RATIO),)

    def test_only_memory_takes_all_cores(self) -> None:
        raw = allocated(claim("c", request(memory="8Gi")), result(cores="100", memory="8Gi"))
        assert containers(raw) == (ContainerRequest("gpu", 1, WHOLE_CORE, 8 * GIB),)

    def test_missing_consumed_capacity_is_a_whole_card(self) -> None:
        assert containers(allocated(claim(), result())) == (ContainerRequest("gpu", 1, WHOLE_CORE, whole=True),)

    def test_share_of_nothing_counts_as_the_least_share(self) -> None:
        raw = allocated(claim("c", request(cores=0, memory=0)), result(cores="0", memory="0"))
        assert gpu_request(read_claim(raw)).containers == (ContainerRequest("gpu", 1, 10, 1 << 20),)

    def test_results_of_one_request_are_one_container_with_several_cards(self) -> None:
        raw = allocated(claim("c", request(cores=30, count=2)), share("card-0"), share("card-1"))
        assert [(one.container, one.cards) for one in containers(raw)] == [("gpu", 2)]

    def test_all_devices_are_as_many_cards_as_there_are_results(self) -> None:
        raw = allocated(claim("c", request(allocationMode="All")), *(result(f"card-{i}") for i in range(3)))
        assert containers(raw) == (ContainerRequest("gpu", 3, WHOLE_CORE, whole=True),)

    def test_only_the_allocated_alternative_counts(self) -> None:
        alternatives = [{"name": "large", **exactly(80, "40Gi")}, {"name": "small", **exactly(10, "1Gi")}]
        raw = claim("c", {"name": "gpu", "firstAvailable": alternatives})
        found = containers(allocated(raw, result(request="gpu/small", cores="10", memory="1Gi")))
        assert found == (ContainerRequest("gpu/small", 1, 100, GIB),)

    def test_administrative_access_requests_nothing(self) -> None:
        assert containers(allocated(claim(), {**share(), "adminAccess": True})) == ()

    def test_request_before_the_allocation_has_the_chosen_alternatives(self) -> None:
        alternatives = [{"name": "large", **exactly(80, "40Gi")}, {"name": "all", "allocationMode": "All"}]
        found = read_claim(claim("c", {"name": "gpu", "firstAvailable": alternatives}, request("b", adminAccess=True)))
        large = requests_before_allocation(found, {"gpu/large", "b"}).containers
        assert large == (ContainerRequest("gpu/large", 1, 800, 40 * GIB),)
        every = requests_before_allocation(found, {"gpu/all"}).containers
        assert every == (ContainerRequest("gpu/all", 1, WHOLE_CORE, whole=True),)


class TestHolding:
    def test_claim_holds_a_share_for_each_result(self) -> None:
        raw = allocated(
            claim("c", request("a", cores=30, memory="8Gi"), request("b")),
            share("card-1", request="a"),
            result("card-0", "b", cores="100", memory="80Gi"),
        )
        holding = claim_holding(read_claim(raw))
        assert holding is not None
        assert (holding.uid, holding.node, holding.dialect, holding.bound) == ("uid-c", "n1", DRA, True)
        assert holding.shares == (Share("a", 1, 300, 8 * GIB), Share("b", 0, WHOLE_CORE, whole=True))

    def test_claim_that_several_pods_use_holds_its_share_once(self) -> None:
        holding = claim_holding(read_claim(allocated(claim(), share(), pods=("p", "q", "r"))))
        assert holding is not None
        assert len(holding.shares) == 1

    @pytest.mark.parametrize(
        "raw",
        [
            pytest.param(claim(), id="not allocated"),
            pytest.param(allocated(claim(), {**share(), "driver": "other.example"}), id="other driver"),
            pytest.param(allocated(claim(), {**share(), "adminAccess": True}), id="administrative access"),
            pytest.param(allocated(claim(), share("no-such-card")), id="no card of mgpu"),
        ],
    )
    def test_claim_holds_nothing(self, raw: dict[str, Any]) -> None:
        assert claim_holding(read_claim(raw)) is None


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ContainerRequest("c", 1, WHOLE_CORE, whole=True), {"cores": "100", "memory": "40Gi"}),
        (ContainerRequest("c", 1, 500, 0, ratio=WHOLE_RATIO), {"cores": "50", "memory": "40Gi"}),
        (ContainerRequest("c", 1, 301, 8 * GIB), {"cores": "31", "memory": "8Gi"}),
    ],
)
def test_consumed_capacity_depends_on_the_card(request_: ContainerRequest, expected: dict[str, str]) -> None:
    assert consumed_capacity(request_, b.card(gib=40)) == expected


@pytest.mark.parametrize(
    "name", ["card-", "card-01", "card--1", "card-1a", "card-٣", "1", "", "Card-1", "card-" + "1" * 5000]
)
def test_other_names_of_devices_stand_for_no_card(name: str) -> None:
    assert card_index(name) is None
    assert card_index(device_name(17)) == 17


def test_path_of_a_claim_quotes_the_names() -> None:
    assert claim_path("a", "b/c") == "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims/b%2Fc"


@pytest.mark.parametrize(
    ("version", "other", "newer"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("", "9", True), ("9", "", True), ("x", "y", True)],
)
def test_resource_versions_are_compared_as_numbers(version: str, other: str, newer: bool) -> None:
    assert is_newer(version, other) is newer


def test_key_of_a_claim_is_its_namespace_and_name() -> None:
    assert Claim("u", "a", "b").key == "a/b"
