"""The instances of claims never overlap, are found whenever there are any, and a single one is the best one."""

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.mig import Instance, invalid_reason, layout_of, possible_instances
from mgpu.model.mig_devices import MigCardState, MigDevice, offers_of
from scheduler.engine.effort import Budget, Effort
from scheduler.engine.mig_placement import InstanceRelation, WantedInstance, fit_together, place_instances
from tests.examples import examples

GIB = 1 << 30
A30 = "NVIDIA A30", 24 * GIB
A100 = "A100-SXM4-80GB", 80 * GIB


def card(index: int = 0, kind: tuple[str, int] = A100) -> Card:
    return Card(index, f"GPU-{index}", *kind)


def state(index: int = 0, *used: Instance, kind: tuple[str, int] = A100) -> MigCardState:
    return MigCardState(card(index, kind), frozenset(used))


def of_profile(cards: Sequence[MigCardState], profile: str) -> frozenset[MigDevice]:
    devices = (offer.device for one in cards for offer in offers_of(one.card))
    return frozenset(device for device in devices if device.instance.profile == profile)


def wanted(cards: Sequence[MigCardState], *profiles: str) -> list[WantedInstance]:
    return [WantedInstance("gpu", of_profile(cards, profile)) for profile in profiles]


def place(cards: Sequence[MigCardState], *profiles: str) -> list[str] | None:
    found = place_instances(cards, wanted(cards, *profiles))
    assert found.proven
    return None if found.devices is None else [str(device) for device in found.devices]


def test_instance_leaves_the_most_choice_on_an_empty_card() -> None:
    assert place([state()], "1g.10gb") == ["1g.10gb at 6 of card 0"]
    assert place([state()], "3g.40gb") == ["3g.40gb at 4 of card 0"]


def test_instance_goes_to_the_card_that_is_partitioned_already() -> None:
    cards = [state(0), state(1, Instance(6, "1g.10gb"))]
    assert place(cards, "1g.10gb") == ["1g.10gb at 5 of card 1"]
    assert place(cards, "7g.80gb") == ["7g.80gb at 0 of card 0"]


def test_equal_cards_are_taken_by_index() -> None:
    assert place([state(3), state(1), state(2)], "7g.80gb") == ["7g.80gb at 0 of card 1"]


def test_later_instance_moves_an_earlier_one() -> None:
    """The best place of the first 2g.20gb alone is not on the only card on which 4g.40gb fits."""
    cards = [state(0, Instance(4, "3g.40gb"))]
    assert place(cards, "2g.20gb", "2g.20gb") == ["2g.20gb at 2 of card 0", "2g.20gb at 0 of card 0"]
    assert place(cards, "2g.20gb", "4g.40gb") is None


def test_many_equal_instances_that_do_not_fit_are_rejected_soon() -> None:
    cards = [state(index) for index in range(4)]
    found = place_instances(cards, wanted(cards, *["3g.40gb"] * 9))
    assert (found.devices, found.proven) == (None, True)


def test_relations_keep_instances_on_one_card_or_on_different_ones() -> None:
    cards = [state(0, Instance(4, "3g.40gb")), state(1)]
    both = frozenset({0, 1})
    same = InstanceRelation(both, lambda device: device.card)
    found = place_instances(cards, wanted(cards, "3g.40gb", "3g.40gb"), [same])
    assert found.devices is not None
    assert {device.card for device in found.devices} == {1}
    different = InstanceRelation(both, lambda device: device.card, distinct=True)
    found = place_instances(cards, wanted(cards, "3g.40gb", "3g.40gb"), [different])
    assert found.devices is not None
    assert {device.card for device in found.devices} == {0, 1}
    assert place_instances(cards, wanted(cards, "4g.40gb", "4g.40gb"), [same]).devices is None


@st.composite
def partitioned(draw: st.DrawFn, index: int, kind: tuple[str, int]) -> MigCardState:
    layout = layout_of(*kind)
    assert layout is not None
    used: list[Instance] = []
    for _ in range(draw(st.integers(0, 3))):
        possible = possible_instances(layout, used)
        if possible:
            used.append(draw(st.sampled_from(possible)))
    return state(index, *used, kind=kind)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[MigCardState], list[str]]:
    kind = draw(st.sampled_from([A30, A100]))
    layout = layout_of(*kind)
    assert layout is not None
    cards = [draw(partitioned(index, kind)) for index in range(draw(st.integers(1, 2)))]
    profiles = [profile.name for profile in layout.profiles]
    return cards, draw(st.lists(st.sampled_from(profiles), min_size=1, max_size=3))


def brute_force(cards: Sequence[MigCardState], profiles: Sequence[str]) -> Iterator[tuple[MigDevice, ...]]:
    """Yield every combination of instances that do not overlap, by the rules of `mig.invalid_reason` alone."""
    for devices in product(*(sorted(of_profile(cards, profile)) for profile in profiles)):
        if all(_is_valid(one, [d.instance for d in devices if d.card == one.card.index]) for one in cards):
            yield devices


def _is_valid(one: MigCardState, new: list[Instance]) -> bool:
    layout = one.layout
    assert layout is not None
    return len({*one.used, *new}) == len(one.used) + len(new) and invalid_reason(layout, {*one.used, *new}) is None


@examples(150)
@given(situations())
def test_instances_are_found_exactly_if_there_are_any(situation: tuple[list[MigCardState], list[str]]) -> None:
    cards, profiles = situation
    found = place_instances(cards, wanted(cards, *profiles))
    every = set(brute_force(cards, profiles))
    assert found.proven
    assert (found.devices is None) == (not every)
    if found.devices is not None:
        assert found.devices in every
        assert fit_together(cards, found.devices)
    assert place_instances(cards[::-1], wanted(cards, *profiles)) == found


@examples(150)
@given(situations())
def test_single_instance_is_the_best_one(situation: tuple[list[MigCardState], list[str]]) -> None:
    cards, (profile, *_) = situation

    def left(device: MigDevice) -> int:
        after = [one.with_instance(device.instance) if one.card.index == device.card else one for one in cards]
        return sum(len(one.possible()) for one in after)

    every = [device for (device,) in brute_force(cards, [profile])]
    best = min(every, key=lambda d: (-left(d), d.card, -d.instance.start), default=None)
    found = place_instances(cards, wanted(cards, profile)).devices
    assert (found[0] if found else None) == best


@examples(60)
@given(st.data())
def test_sequence_of_claims_on_one_card_never_overlaps(data: st.DataObject) -> None:
    """Claims come and go. A claim gets an instance exactly if the card can have one more of its profile."""
    held: list[Instance] = []
    layout = layout_of(*A100)
    assert layout is not None
    for _ in range(data.draw(st.integers(1, 12))):
        releases: bool = data.draw(st.booleans())
        if held and releases:
            held.pop(data.draw(st.integers(0, len(held) - 1)))
            continue
        profile = data.draw(st.sampled_from([p.name for p in layout.profiles]))
        cards = [state(0, *held)]
        found = place_instances(cards, wanted(cards, profile)).devices
        fits = any(invalid_reason(layout, [*held, d.instance]) is None for d in of_profile(cards, profile))
        assert (found is not None) == fits
        if found is not None:
            held.append(found[0].instance)
        assert invalid_reason(layout, held) is None


def test_search_ends_with_its_budget() -> None:
    cards = [state(index) for index in range(8)]
    found = place_instances(cards, wanted(cards, "2g.20gb", "2g.20gb"), budget=Budget(Effort(), 300))
    assert (found.devices, found.proven) == (None, False)


def test_instances_of_a_claim_count_for_the_budget() -> None:
    """A full search for 32 instances took 0.7 s of CPU time instead of 0.2 s."""
    spent = []
    for count in (8, 32):
        effort = Effort()
        cards = [state()]
        found = place_instances(cards, wanted(cards, *["1g.10gb"] * count), (), Budget(effort, 600_000))
        assert (found.devices, found.proven) == (None, True)
        spent.append(effort.spent)
    assert spent[1] > 2 * spent[0]
