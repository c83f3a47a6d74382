"""What a pod needs of a card at its peak (KEP-753), and how refusals read."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.gpu_requests import (
    Amount,
    CardRefusal,
    ContainerRequest,
    Rejection,
    RejectionKind,
    Requirement,
    cards_rejection,
    peak,
    whole_cards,
)
from mgpu.model.ledger import Share
from mgpu.model.pods import Node, Stage
from tests.builders import GIB, card

INIT, SIDECAR, APP = Stage.INIT, Stage.SIDECAR, Stage.APP


@pytest.mark.parametrize(
    ("uses", "core"),
    [
        ([], 0),
        ([(APP, 300), (APP, 200)], 500),
        ([(INIT, 700), (APP, 300), (APP, 200)], 700),
        ([(INIT, 400), (INIT, 300), (APP, 100)], 400),
        ([(SIDECAR, 200), (INIT, 500), (APP, 400)], 700),
        ([(INIT, 500), (SIDECAR, 200), (APP, 100)], 500),
        ([(SIDECAR, 200), (SIDECAR, 300), (APP, 400)], 900),
    ],
)
def test_peak_of_the_containers_in_start_order(uses: list[tuple[Stage, int]], core: int) -> None:
    assert peak((stage, Amount(value, 0, 1)) for stage, value in uses).core == core


def test_each_dimension_has_its_own_peak() -> None:
    assert peak([(INIT, Amount(900, 1, 1)), (APP, Amount(100, 5, 1)), (APP, Amount(100, 5, 1))]) == Amount(900, 10, 2)


@given(st.lists(st.tuples(st.sampled_from(Stage), st.integers(0, 1000)), max_size=8))
def test_property_peak_is_the_busiest_moment(uses: list[tuple[Stage, int]]) -> None:
    """Against the kubelet's timeline written out: who runs at each start."""
    moments = [0]
    for i, (stage, value) in enumerate(uses):
        before = [v for s, v in uses[:i] if s is not INIT]
        moments.append(sum(before) + value)
        assert stage in Stage
    assert peak((stage, Amount(value)) for stage, value in uses).core == max(moments)


def test_a_whole_ask_takes_the_card_as_it_is() -> None:
    assert whole_cards("c", 2).amount_on(card(0, gib=40)) == Amount(1000, 40 * GIB, 1, 100)
    assert ContainerRequest("c", core=250, memory=5).amount_on(card(0)) == Amount(250, 5, 1)


@pytest.mark.parametrize(
    ("memory", "ratio", "of", "expected"),
    [
        (100, None, 8 * GIB, (100, 0)),
        (0, 29, 100, (29, 29)),
        (0, 33, 10, (3, 33)),
        (1, 0, 8 * GIB, (1, 1)),
        (GIB, 0, 8 * GIB, (GIB, 13)),
        (8 * GIB, 0, 8 * GIB, (8 * GIB, 100)),
        (12 * GIB, 0, 8 * GIB, (12 * GIB, 150)),
        (3 * GIB, 40, 8 * GIB, (3 * GIB, 40)),
        (0, 0, 8 * GIB, (0, 0)),
        (0, 50, 0, (0, 50)),
    ],
)
def test_of_bytes_and_percent_one_follows_from_the_other(
    memory: int, ratio: int | None, of: int, expected: tuple[int, int]
) -> None:
    """Bytes are rounded down, percent up, in integers: 29 percent are 29."""
    there = Card(0, "GPU-0", "", of)
    takes = ContainerRequest("c", memory=memory, ratio=ratio).amount_on(there)
    assert (takes.memory, takes.ratio) == expected
    assert Share("c", 0, memory=memory, ratio=ratio).amount(there) == takes


def test_a_rejection_adds_up_its_cards() -> None:
    cards = (
        CardRefusal(0, RejectionKind.UNHEALTHY, "unhealthy"),
        CardRefusal(1, RejectionKind.MEMORY, "memory 4.0 GiB short"),
        CardRefusal(2, RejectionKind.MEMORY, "memory 4.0 GiB short"),
    )
    assert str(cards_rejection(cards)) == "3 cards: 2 memory 4.0 GiB short, 1 unhealthy"
    assert str(cards_rejection(cards[:1], "no card fits")) == "no card fits (1 card: 1 unhealthy)"
    assert str(Rejection(RejectionKind.NODE_LABEL, "wrong label")) == "wrong label"


def test_cards_rejection_is_of_the_kind_that_most_cards_have_and_of_equals_the_first_by_text() -> None:
    short, ill = CardRefusal(0, RejectionKind.CORE, "core short"), CardRefusal(1, RejectionKind.UNHEALTHY, "unhealthy")
    assert cards_rejection([ill, short, ill]).kind is RejectionKind.UNHEALTHY
    assert cards_rejection([ill, short]).kind is RejectionKind.CORE


def test_summary_reads_well_behind_a_number_of_nodes() -> None:
    ill = CardRefusal(0, RejectionKind.UNHEALTHY, "unhealthy")
    assert cards_rejection([ill]).summary() == Rejection(
        RejectionKind.UNHEALTHY, "insufficient GPU (1 card: 1 unhealthy)"
    )
    assert cards_rejection([replace(ill, type="rdma")]).summary().reason.startswith("insufficient rdma (1 rdma")
    assert cards_rejection([ill], "container 'c' needs 2 cards").summary().reason == (
        "container 'c' needs 2 cards (1 card: 1 unhealthy)"
    )


def test_a_requirement_names_what_the_node_has() -> None:
    needs = Requirement("policy", ("native",), "node has {found}", default="fixed")
    assert needs.unmet_requirement(Node("n", labels={"policy": "native"})) is None
    assert needs.unmet_requirement(Node("n")) == "node has fixed"
    assert Requirement("zone", ("a",), "zone is {found}").unmet_requirement(Node("n")) == "zone is not set"
