"""Partition plans of a node, against all that its cards could be partitioned into together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.slices import ASKS, run
from mgpu.model.cards import Card
from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.mig import invalid_reason, layout_of
from mgpu.model.node_slices import NO_SLICES, NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice
from scheduler.engine.partitioning.partition_plan import can_offer, partitionable_cards, plan_cards
from tests.examples import examples
from tests.scheduler.partitioning.exhaustive import Instances, all_cuts, free_in

MODELS = {"NVIDIA A30": 24, "NVIDIA A100-SXM4-80GB": 80}
ASKED = ("1g.6gb", "2g.12gb", "4g.24gb", "1g.10gb", "2g.20gb", "3g.40gb", "1g.10gb+me")


def gpus(*models: str, gib: int = 0) -> list[Card]:
    return [Card(i, f"GPU-{i}", model, (gib or MODELS[model]) << 30) for i, model in enumerate(models)]


def a100s(count: int) -> list[Card]:
    return gpus(*["NVIDIA A100-SXM4-80GB"] * count)


def mig(*made: Slice, cards: int = 8) -> NodeSlices:
    return NodeSlices(MIG, existing=made, cards=frozenset(range(cards)))


def mps(*made: Slice) -> NodeSlices:
    return NodeSlices(MPS, existing=made)


def plan(
    gpus: Sequence[Card],
    observed: NodeSlices,
    used: Sequence[Slice],
    requests: Sequence[Mapping[str, int]],
    unavailable: Mapping[int, str] = {},
) -> tuple[Slice, ...] | Rejection:
    return plan_cards(partitionable_cards(gpus, observed, used, {}, unavailable), requests)


def planned_slices(
    gpus: Sequence[Card], observed: NodeSlices, used: Sequence[Slice], *requests: Mapping[str, int]
) -> tuple[Slice, ...]:
    planned = plan(gpus, observed, used, requests)
    assert not isinstance(planned, Rejection)
    return planned


def by_card(slices: Sequence[Slice]) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for s in slices:
        found.setdefault(s.card, Counter())[s.name] += 1
    return found


Cut = tuple[Card, Instances, Instances]
"""A card, what is used of it and what is free."""


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[Cut], Counter[str]]:
    """One to three cards and the request of a pod."""
    cards = gpus(*draw(st.lists(st.sampled_from(sorted(MODELS)), min_size=1, max_size=3)))
    cuts = []
    for card in cards:
        made = draw(st.sampled_from(cuts_of(card)))
        used = frozenset(i for i in sorted(made) if draw(st.booleans()))
        cuts.append((card, used, made - used))
    return cuts, Counter(draw(st.lists(st.sampled_from(ASKED), min_size=1, max_size=4)))


def cuts_of(card: Card) -> tuple[Instances, ...]:
    layout = layout_of(card.model, card.memory)
    assert layout
    return all_cuts(layout)


def slices(card: Card, instances: Instances) -> list[Slice]:
    return [Slice(card.index, start, name) for start, name in sorted(instances)]


def fewest_changed(cuts: Sequence[Cut], asked: Counter[str]) -> int | None:
    """Return the fewest cards that change if the request is served, or None if it cannot be."""
    names = tuple(sorted(asked))
    best: dict[tuple[int, ...], int] = {(0,) * len(names): 0}
    for card, used, free in cuts:
        reached: dict[tuple[int, ...], int] = {}
        for gift, changed in gifts(card.model, used, free, names).items():
            for before, count in best.items():
                after = tuple(min(asked[n], a + b) for n, a, b in zip(names, before, gift, strict=True))
                reached[after] = min(reached.get(after, 99), count + changed)
        best = reached
    return best.get(tuple(asked[name] for name in names))


@cache
def gifts(model: str, used: Instances, free: Instances, names: tuple[str, ...]) -> dict[tuple[int, ...], int]:
    """Return what the card could have free of these → 1 if it must change for that."""
    found: dict[tuple[int, ...], int] = {}
    for cut in cuts_of(gpus(model)[0]):
        if used <= cut:
            there = free_in(cut, used)
            gift = tuple(there[name] for name in names)
            found[gift] = min(found.get(gift, 1), int(cut != used | free))
    return found


@given(nodes(), st.randoms(use_true_random=False))
@examples(25)
def test_property_plan_exists_exactly_if_possible_with_the_fewest_changes(
    node: tuple[list[Cut], Counter[str]], chance: object
) -> None:
    cuts, asked = node
    cards = [card for card, _, _ in cuts]
    used = [s for card, busy, _ in cuts for s in slices(card, busy)]
    made = used + [s for card, _, free in cuts for s in slices(card, free)]
    planned = plan(cards, mig(*made), used, [asked])
    assert can_offer(partitionable_cards(cards, mig(*made), used, {}, {}), asked) == (
        not isinstance(planned, Rejection)
    )
    fewest = fewest_changed(cuts, asked)
    if isinstance(planned, Rejection):
        assert fewest is None
        assert planned.hopeless == (fewest_changed([(card, frozenset(), frozenset()) for card in cards], asked) is None)
        assert {refusal.index for refusal in planned.cards} == {card.index for card in cards}
        return
    assert {*used} <= {*planned}
    assert Counter(s.name for s in planned if s not in used) >= asked
    assert fewest == sum(
        set(slices(c, busy | free)) != {s for s in planned if s.card == c.index} for c, busy, free in cuts
    )
    for card in cards:
        layout = layout_of(card.model, card.memory)
        assert layout
        assert invalid_reason(layout, [s.instance for s in planned if s.card == card.index]) is None
    for listed in (cards, made, used):
        chance.shuffle(listed)  # type: ignore[attr-defined]
    assert plan(cards, mig(*made), used, [asked]) == planned


def test_plan_partitions_one_empty_card_and_keeps_the_others_whole() -> None:
    planned = planned_slices(a100s(3), mig(), [], {"2g.20gb": 2})
    assert by_card(planned) == {0: Counter({"2g.20gb": 2, "1g.10gb": 3})}


@pytest.mark.parametrize(
    ("model", "used", "free", "asked", "cut"),
    [
        ("NVIDIA A100-SXM4-80GB", {0: "1g.10gb", 3: "1g.10gb"}, {}, ["1g.10gb"] * 6, {"1g.10gb": 7}),
        ("NVIDIA A100-SXM4-80GB", {0: "3g.40gb"}, {4: "1g.10gb", 5: "1g.10gb"}, ["3g.40gb"], {"3g.40gb": 2}),
        ("NVIDIA A30", {0: "1g.6gb", 1: "1g.6gb"}, {2: "2g.12gb"}, ["1g.6gb"], {"1g.6gb": 4}),
        ("NVIDIA A30", {}, {0: "1g.6gb", 3: "1g.6gb"}, ["4g.24gb"], {"4g.24gb": 1}),
        ("NVIDIA A30", {0: "1g.6gb"}, {}, ["4g.24gb"], None),
        ("NVIDIA A30", {0: "4g.24gb"}, {}, ["1g.6gb"], None),
    ],
)
def test_plan_destroys_free_instances_and_never_used_ones(
    model: str, used: dict[int, str], free: dict[int, str], asked: list[str], cut: Mapping[str, int] | None
) -> None:
    busy, idle = ([Slice(0, start, name) for start, name in part.items()] for part in (used, free))
    planned = plan(gpus(model), mig(*busy, *idle), busy, [{name: 1} for name in asked])
    assert {*busy} <= {*(planned if isinstance(planned, tuple) else busy)}
    assert (by_card(planned)[0] if isinstance(planned, tuple) else None) == cut


def test_plan_uses_free_slices_first() -> None:
    free = (Slice(0, 0, "3g.40gb"), Slice(1, 4, "2g.20gb"))
    assert plan(a100s(2), mig(*free), [], [{"2g.20gb": 1, "3g.40gb": 1}]) == free


def test_plan_partitions_the_card_that_leaves_more_creatable() -> None:
    """Card 1 has no place for a 7g any more."""
    used = Slice(1, 6, "1g.10gb")
    planned = planned_slices(a100s(2), mig(used), [used], {"1g.10gb": 1})
    assert by_card(planned) == {1: Counter({"1g.10gb": 7})}


def test_plan_serves_further_pods_as_far_as_possible() -> None:
    wanted = [{"4g.40gb": 1}, {"7g.80gb": 1}, {"3g.40gb": 1}, {"2g.20gb": 9}, {"4gb": 1}, {"2g.20gb": 1}]
    planned = plan(a100s(1), mig(), [], wanted)
    assert planned == (Slice(0, 0, "4g.40gb"), Slice(0, 4, "2g.20gb"), Slice(0, 6, "1g.10gb"))
    planned = planned_slices(a100s(2), mig(), [], *wanted)
    assert by_card(planned)[0] == Counter({"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1})
    assert by_card(planned)[1] == Counter({"3g.40gb": 1, "1g.10gb": 4})


def test_plan_serves_further_pods_on_cards_that_change_anyway() -> None:
    used = Slice(1, 6, "1g.10gb")
    planned = planned_slices(a100s(2), mig(used), [used], {"1g.10gb": 1}, {"2g.20gb": 1})
    assert by_card(planned) == {1: Counter({"2g.20gb": 1, "1g.10gb": 5})}


def test_plan_serves_further_pods_with_free_slices() -> None:
    free = Slice(1, 0, "7g.80gb")
    planned = planned_slices(a100s(2), mig(free), [], {"3g.40gb": 1}, {"7g.80gb": 1})
    assert free in planned
    assert by_card(planned)[0] == Counter({"3g.40gb": 1, "1g.10gb": 4})


def test_plan_creates_missing_used_slices_again() -> None:
    used = Slice(0, 2, "2g.20gb")
    assert plan(a100s(1), mig(), [used], []) == (used,)
    planned = planned_slices(a100s(1), mig(Slice(0, 0, "4g.40gb")), [used], {"3g.40gb": 1})
    assert {used, Slice(0, 4, "3g.40gb")} < {*planned}


def test_plan_ignores_uuids_and_pods_of_slices() -> None:
    made = Slice(0, 6, "1g.10gb", uuid="MIG-1", pod="uid-p")
    planned = planned_slices(a100s(1), mig(made), [made], {"4g.40gb": 1})
    assert made.place in planned
    assert made not in planned


def test_cards_that_cannot_be_partitioned_have_a_reason_and_keep_their_slices() -> None:
    well = a100s(6)
    cards = [well[0], Card(1, "GPU-1", well[1].model, well[1].memory, healthy=False), *well[2:5]]
    cards.append(Card(5, "GPU-5", "NVIDIA T4", 16 << 30))
    used = [Slice(0, 0, "1g.10gb"), Slice(0, 4, "1g.10gb"), Slice(4, 1, "3g.40gb")]
    made = [*used, Slice(1, 0, "7g.80gb"), Slice(7, 0, "2g.20gb")]
    found = NodeSlices(MIG, existing=tuple(made), cards=frozenset({0, 1, 3, 4, 5}))
    barred = {3: "held by other pods"}
    rejected = plan(cards, found, used, [{"3g.40gb": 1}], unavailable=barred)
    assert isinstance(rejected, Rejection)
    assert [refusal.reason for refusal in rejected.cards] == [
        "1g.10gb in use at 0, 4: no room for 3g.40gb",
        "unhealthy",
        "not in MIG mode",
        "held by other pods",
        "a 3g.40gb is in use at 1, where it cannot exist",
        "cannot be partitioned",
    ]
    assert not rejected.hopeless
    planned = plan(cards, found, used, [{"2g.20gb": 1}], unavailable=barred)
    assert not isinstance(planned, Rejection)
    assert {*made} < {*planned}


def test_node_without_positions_of_instances_is_rejected() -> None:
    found = NodeSlices(MIG, existing=(Slice(0, 0, "1g.10gb"),), cards=frozenset({0}), has_positions=False)
    rejected = plan(a100s(1), found, [], [{"2g.20gb": 1}])
    assert isinstance(rejected, Rejection)
    assert [refusal.reason for refusal in rejected.cards] == ["the places of its instances are not known"]


@pytest.mark.parametrize(
    ("found", "asked", "why"),
    [
        (mig(), {"4gb": 1}, "the node's cards are partitioned by mig, and 4gb is not a slice of mig"),
        (mps(), {"2g.20gb": 1, "4gb": 1}, "the node's cards are partitioned by mps, and 2g.20gb is not a slice of mps"),
        (NO_SLICES, {"2g.20gb": 1}, "the node's cards are not partitioned"),
    ],
)
def test_slices_of_another_mode_are_rejected_as_hopeless(found: NodeSlices, asked: Mapping[str, int], why: str) -> None:
    assert plan(a100s(1), found, [], [asked]) == Rejection(RejectionKind.SLICES, why, hopeless=True)


def test_node_without_cards_is_rejected_as_hopeless() -> None:
    assert plan([], mig(), [], [{"2g.20gb": 1}]) == Rejection(
        RejectionKind.NO_DEVICE, "the node has no cards", hopeless=True
    )


def test_request_beyond_the_node_is_hopeless_and_one_blocked_by_pods_is_not() -> None:
    used = [Slice(0, 0, "7g.80gb")]
    held = plan(a100s(1), mig(*used), used, [{"7g.80gb": 1}])
    barred = plan(a100s(1), mig(), [], [{"7g.80gb": 1}], unavailable={0: "held by other pods"})
    too_many = plan(a100s(1), mig(), [], [{"7g.80gb": 2}])
    assert isinstance(held, Rejection)
    assert isinstance(barred, Rejection)
    assert isinstance(too_many, Rejection)
    assert (held.hopeless, barred.hopeless, too_many.hopeless) == (False, False, True)
    assert str(too_many) == "1 card: 1 room for 1 of 2 7g.80gb"


def test_mps_plan_fills_partitioned_card_before_whole_one() -> None:
    made = Slice(1, 0, "4gb")
    planned = plan(a100s(2), mps(made), [made], [{"10gb": 2}])
    assert planned == (made, Slice(1, 1, "10gb"), Slice(1, 2, "10gb"))


def test_mps_plan_destroys_free_slices_before_it_takes_a_whole_card() -> None:
    free = (Slice(1, 0, "40gb"), Slice(1, 1, "40gb"))
    assert plan(a100s(2), mps(*free), [], [{"10gb": 1}]) == (free[0], Slice(1, 1, "10gb"))


def test_mps_plan_fills_the_fuller_card() -> None:
    used = [Slice(0, 0, "4gb"), Slice(1, 0, "40gb")]
    assert plan(a100s(2), mps(*used), used, [{"10gb": 1}]) == (*used, Slice(1, 1, "10gb"))


def test_mps_plan_for_slices_of_two_cards() -> None:
    planned = plan(a100s(3), mps(), [], [{"50gb": 1, "40gb": 2}], unavailable={1: "held by other pods"})
    assert planned == (Slice(0, 0, "40gb"), Slice(0, 1, "40gb"), Slice(2, 0, "50gb"))


def test_plan_for_dozens_of_slices_ends_at_once() -> None:
    asked = {"1g.10gb": 8, "2g.20gb": 8, "3g.40gb": 8, "1g.20gb": 8, "4g.40gb": 4}
    planned = planned_slices(a100s(16), mig(cards=16), [], asked)
    assert Counter(s.name for s in planned) >= Counter(asked)
    assert isinstance(plan(a100s(8), mig(), [], [asked | {"1g.10gb": 56}]), Rejection)
    shares = {f"{n}gb": 10 for n in range(1, 10)}
    assert isinstance(plan(a100s(4), mps(), [], [shares]), Rejection)
    assert not isinstance(plan(a100s(8), mps(), [], [shares]), Rejection)


def test_plan_over_a_thousand_nodes_takes_under_a_second() -> None:
    """A bound that no load of the machine breaks; `bench/slices.py` measures the time, 4 to 70 ms."""
    rows = run()
    assert len(rows) == len(ASKS)
    assert all(row.planning < 1000 for row in rows)
    assert {row.name: row.could for row in rows}["MIG, nowhere"] == 0
    assert sum(row.could for row in rows) > 5000
