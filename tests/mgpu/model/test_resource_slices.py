"""The ResourceSlice of a node: order, capacities and request policies, attributes and taints of its devices."""

from dataclasses import replace
from typing import Any

import pytest

from mgpu.model.cards import Card
from mgpu.model.resource_claims import DRIVER, card_index
from mgpu.model.resource_slices import (
    CORDONED,
    UNHEALTHY,
    WAKE,
    PublishedCard,
    Taint,
    attributes,
    make_slice,
    slice_name,
)
from tests import builders as b

GIB = 1 << 30
MIB = 1 << 20


def published(index: int = 0, core: int = 1000, memory: int = 80 * GIB, *taints: Taint) -> PublishedCard:
    return PublishedCard(b.card(index), core, memory, tuple(taints))


def devices(*cards: PublishedCard) -> list[dict[str, Any]]:
    found = make_slice("n1", "uid-n1", cards, 1, {})["spec"]["devices"]
    assert isinstance(found, list)
    return found


def capacity(core: int = 1000, memory: int = 80 * GIB) -> dict[str, Any]:
    found = devices(published(0, core, memory))[0]["capacity"]
    assert isinstance(found, dict)
    return found


def test_slice_belongs_to_the_node_and_its_pool_has_the_name_of_the_node() -> None:
    made = make_slice("n1", "uid-n1", [published()], 7, {WAKE: "now"})
    assert made["metadata"]["name"] == slice_name("n1") == "n1-gpu.mgpu.io"
    assert made["metadata"]["annotations"] == {WAKE: "now"}
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-n1", "controller": True}
    ]
    assert {key: made["spec"][key] for key in ("driver", "nodeName", "pool")} == {
        "driver": DRIVER,
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 7, "resourceSliceCount": 1},
    }


class TestOrder:
    def test_cards_with_the_least_free_core_come_first(self) -> None:
        found = devices(published(0, 900), published(1, 100), published(2, 500))
        assert [device["name"] for device in found] == ["card-1", "card-2", "card-0"]

    def test_memory_and_then_the_index_decide_between_equal_cores(self) -> None:
        cards = (published(3), published(2, memory=GIB), published(10), published(1))
        assert [device["name"] for device in devices(*cards)] == ["card-2", "card-1", "card-3", "card-10"]
        assert devices(*cards) == devices(*reversed(cards))


class TestCapacity:
    def test_idle_card_offers_everything_in_steps_of_one_percent_and_one_mebibyte(self) -> None:
        assert capacity() == {
            "cores": {
                "value": "100",
                "requestPolicy": {"default": "100", "validRange": {"min": "0", "step": "1"}},
            },
            "memory": {
                "value": "80Gi",
                "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}},
            },
        }

    def test_default_is_the_whole_card_whatever_is_free(self) -> None:
        """So a request without an amount gets a whole card or nothing."""
        for core, memory in ((1000, 80 * GIB), (300, GIB), (0, 0)):
            found = capacity(core, memory)
            assert found["cores"]["requestPolicy"]["default"] == "100"
            assert found["memory"]["requestPolicy"]["default"] == "80Gi"

    @pytest.mark.parametrize(
        ("milli", "value", "has_range"),
        [(1000, "100", True), (999, "99", True), (20, "2", True), (19, "1", True), (10, "1", True), (9, "0", False)],
    )
    def test_cores_below_one_step_get_no_range(self, milli: int, value: str, has_range: bool) -> None:
        """The API server refuses a range that the value cannot fulfill, and without a range nothing may be offered."""
        found = capacity(core=milli)["cores"]
        assert (found["value"], "validRange" in found["requestPolicy"]) == (value, has_range)

    @pytest.mark.parametrize(
        ("free", "value", "has_range"),
        [(2 * MIB, "2Mi", True), (2 * MIB - 1, "0", False), (MIB, "0", False), (0, "0", False)],
    )
    def test_memory_below_the_minimum_and_one_step_gets_no_range(self, free: int, value: str, has_range: bool) -> None:
        found = capacity(memory=free)["memory"]
        assert (found["value"], "validRange" in found["requestPolicy"]) == (value, has_range)

    def test_card_of_another_size_states_its_own_total(self) -> None:
        card = replace(b.card(), memory=40 * GIB)
        found = devices(PublishedCard(card, 1000, 40 * GIB))[0]["capacity"]["memory"]
        assert (found["value"], found["requestPolicy"]["default"]) == ("40Gi", "40Gi")

    def test_several_claims_may_share_each_card(self) -> None:
        assert all(device["allowMultipleAllocations"] is True for device in devices(published(), published(1)))


class TestAttributes:
    def test_attributes_describe_the_whole_card_with_their_types(self) -> None:
        card = Card(2, "GPU-x", "H200", 141 * GIB, minor=5, numa=1)
        found = devices(PublishedCard(card, 10, 0))[0]["attributes"]
        assert found == {
            "uuid": {"string": "GPU-x"},
            "index": {"int": 2},
            "minor": {"int": 5},
            "totalCores": {"int": 100},
            "totalMemory": {"int": 141 * GIB},
            "model": {"string": "H200"},
            "numa": {"int": 1},
        }

    def test_unknown_model_and_numa_node_are_left_out(self) -> None:
        assert {"model", "numa"}.isdisjoint(attributes(Card(0, "GPU-x", "", GIB)))

    def test_missing_minor_is_the_index(self) -> None:
        assert attributes(Card(3, "GPU-x", "", GIB))["minor"] == 3

    def test_long_text_is_shortened_to_what_the_api_server_allows(self) -> None:
        found = devices(PublishedCard(Card(0, "GPU-x", "m" * 100, GIB), 0, 0))[0]["attributes"]["model"]
        assert found == {"string": "m" * 64}


class TestTaints:
    def test_taints_have_key_and_effect_and_a_value_if_there_is_one(self) -> None:
        found = devices(published(0, 1000, GIB, UNHEALTHY, CORDONED, Taint("a/b", "c", "NoExecute")))[0]["taints"]
        assert found == [
            {"key": "mgpu.io/unhealthy", "effect": "NoSchedule"},
            {"key": "mgpu.io/cordoned", "effect": "NoSchedule"},
            {"key": "a/b", "effect": "NoExecute", "value": "c"},
        ]

    def test_card_without_taints_has_no_field_for_them(self) -> None:
        assert "taints" not in devices(published())[0]


def test_names_of_devices_are_read_back_as_indexes() -> None:
    assert [card_index(device["name"]) for device in devices(published(0), published(11))] == [0, 11]
