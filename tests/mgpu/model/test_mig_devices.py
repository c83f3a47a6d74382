"""MIG instances as devices of claims: their names, what is in use, and what the counters allow."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.claim_object import read_claim
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig import LAYOUTS, Instance, Layout, invalid_reason, possible_instances
from mgpu.model.mig_devices import (
    MigDevice,
    instances_of,
    mig_card_states,
    mig_device_at,
    offers_of,
    read_mig_device,
    share_of_instance,
    with_whole_cards,
)
from mgpu.model.mig_resource_slices import (
    PublishedMigCard,
    consumed_by,
    count_mig_slices,
    counters_of,
    make_mig_slices,
)
from mgpu.model.resource_claims import card_index, claim_holding, gpu_request
from tests import builders as b
from tests.examples import examples
from tests.scheduler.claim_objects import allocated, claim, request, result, share

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
EVERY = [(layout, Instance(start, p.name)) for layout in LAYOUTS for p in layout.profiles for start in p.starts]
layouts = st.sampled_from(LAYOUTS)


def held(*shares: Share) -> Holding:
    return Holding("uid-a", "default", "a", "n1", "dra", shares)


@pytest.mark.parametrize("instance", sorted({instance for _, instance in EVERY}), ids=str)
def test_name_of_each_instance_is_a_label_and_can_be_read(instance: Instance) -> None:
    device = MigDevice(15, instance)
    assert LABEL.fullmatch(device.name)
    assert read_mig_device(device.name) == device
    assert mig_device_at(device.type, device.index) == device
    assert card_index(device.name) is None


@pytest.mark.parametrize(
    "name", ["card-0", "card-0-mig", "card-00-mig-2g-20gb-4", "card-0-mig-2g-20gb-04", "card-0-mig-2g-20gb-me", "x"]
)
def test_other_names_are_no_instances(name: str) -> None:
    assert read_mig_device(name) is None


def test_claim_with_an_instance_and_a_share_holds_both() -> None:
    raw = allocated(claim("c", request("a"), request("b", 30, "8Gi")), result("card-1-mig-2g-20gb-4", "a"))
    raw["status"]["allocation"]["devices"]["results"].append(share("card-0", request="b"))
    found = read_claim(raw)
    holding = claim_holding(found)
    wanted = gpu_request(found)
    assert [one.type for one in wanted.others] == ["mig-2g.20gb"]
    assert [one.container for one in wanted.containers] == ["b"]
    assert holding is not None
    assert instances_of(holding.shares) == (MigDevice(1, Instance(4, "2g.20gb")),)
    assert [share.card for share in with_whole_cards(holding).shares] == [104, 0, 1]


def test_card_of_another_holder_is_blocked_and_that_of_an_instance_is_not() -> None:
    instance = share_of_instance("gpu", MigDevice(0, Instance(4, "2g.20gb")))
    states = mig_card_states(b.cards(2), [with_whole_cards(held(instance)), held(Share("c", 1, 300))])
    assert [(state.used, state.blocked) for state in states] == [
        (frozenset({Instance(4, "2g.20gb")}), False),
        (frozenset(), True),
    ]
    assert not states[1].possible()


def test_instance_that_the_card_cannot_have_takes_nothing() -> None:
    forged = share_of_instance("gpu", MigDevice(0, Instance(1, "9g.99gb")))
    (state,) = mig_card_states(b.cards(1), [held(forged)])
    assert state.used == frozenset()


def test_share_on_an_unknown_card_blocks_all_cards() -> None:
    states = mig_card_states(b.cards(2), [held(Share("c", None, 300))])
    assert [state.blocked for state in states] == [True, True]


def test_unhealthy_card_has_no_possible_instances() -> None:
    (state,) = mig_card_states([b.card(0, healthy=False)], [])
    assert state.possible() == ()


def test_card_without_mig_offers_nothing() -> None:
    card = replace(b.card(), model="L40S")
    assert offers_of(card) == ()
    assert mig_card_states([card], []) == ()


@examples(200)
@given(layouts, st.data())
def test_counters_allow_exactly_the_instances_that_fit(layout: Layout, data: st.DataObject) -> None:
    """Instances are added one after the other, as kube-scheduler would and as the ledger would."""
    every = [instance for of, instance in EVERY if of is layout]
    left = dict(counters_of(layout))
    there: list[Instance] = []
    for instance in data.draw(st.lists(st.sampled_from(every), max_size=12)):
        consumed = consumed_by(layout, instance)
        by_counters = all(left[name] >= amount for name, amount in consumed.items())
        by_ledger = instance in possible_instances(layout, there)
        assert by_counters == by_ledger == (invalid_reason(layout, [*there, instance]) is None)
        if by_ledger:
            there.append(instance)
            left = {name: amount - consumed.get(name, 0) for name, amount in left.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 16])
def test_slices_keep_the_limits_of_the_api_server(count: int) -> None:
    cards = [PublishedMigCard(card) for card in b.cards(count)]
    slices = make_mig_slices("n1", "uid-n1", cards, 3, 7)
    assert len(slices) == count_mig_slices(cards)
    names = [one["metadata"]["name"] for one in slices]
    assert names == sorted(set(names))
    devices = []
    sets: dict[str, dict[str, Any]] = {}
    for one in slices:
        spec = one["spec"]
        assert spec["pool"] == {"name": "n1", "generation": 3, "resourceSliceCount": 7}
        assert ("devices" in spec) != ("sharedCounters" in spec)
        assert len(spec.get("devices", ())) <= 64
        assert len(spec.get("sharedCounters", ())) <= 8
        devices += spec.get("devices", [])
        sets |= {row["name"]: row["counters"] for row in spec.get("sharedCounters", ())}
    assert len({device["name"] for device in devices}) == len(devices) == 25 * count
    assert all(len(counters) <= 32 for counters in sets.values())
    for device in devices:
        assert len(device["attributes"]) + len(device["capacity"]) <= 32
        (consumed,) = device["consumesCounters"]
        assert consumed["counters"].keys() <= sets[consumed["counterSet"]].keys()


def test_taken_instances_and_those_of_unhealthy_cards_have_taints() -> None:
    taken = PublishedMigCard(Card(0, "GPU-0", "A100", 80 << 30), frozenset({Instance(4, "2g.20gb")}))
    unhealthy = PublishedMigCard(Card(1, "GPU-1", "A100", 80 << 30, healthy=False))
    rows = [
        row for one in make_mig_slices("n1", "u", [taken, unhealthy], 1, 2) for row in one["spec"].get("devices", ())
    ]
    taints = {row["name"]: [taint["key"] for taint in row.get("taints", ())] for row in rows}
    assert taints["card-0-mig-2g-20gb-4"] == ["mgpu.io/in-use"]
    assert taints["card-0-mig-2g-20gb-0"] == []
    assert {tuple(keys) for name, keys in taints.items() if name.startswith("card-1-")} == {("mgpu.io/unhealthy",)}
