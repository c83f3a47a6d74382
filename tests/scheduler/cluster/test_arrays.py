"""A table of nodes is a snapshot: what changes in the matrix afterwards does not change it."""

import pytest

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.pods import Node
from scheduler.cluster.arrays import ClusterArrays
from scheduler.engine.arrays.node_table import CORE_FREE, NodeTable
from tests.builders import GIB

REQUEST = GpuRequest("mgpu", (ContainerRequest("c", 1, 100, GIB),))
NAMES = ["n0", "n1"]


def card(used: int) -> tuple[CardState, ...]:
    return (CardState(Card(0, "GPU-0", "", 8 * GIB), used, GIB if used else 0, 1 if used else 0),)


@pytest.fixture
def matrix() -> ClusterArrays:
    made = ClusterArrays()
    for name in NAMES:
        made.put(Node(name), card(0))
    return made


def content(table: NodeTable) -> list[tuple[str, int, tuple[CardState, ...]]]:
    return [(table.nodes[at].name, int(table.rows.data[CORE_FREE, at, 0]), table.cards[at]) for at in table.at.tolist()]


def test_table_stays_as_it_was_while_nodes_change(matrix: ClusterArrays) -> None:
    before = matrix.table(NAMES, REQUEST, {})
    expected = content(before)
    matrix.put(Node("n0"), card(400))
    matrix.drop("n1")
    matrix.put(Node("n2"), card(700))  # takes the row of n1
    assert content(before) == expected
    assert content(matrix.table(["n0", "n2"], REQUEST, {})) == [("n0", 600, card(400)), ("n2", 300, card(700))]


def test_each_of_several_tables_in_use_stays_as_it_was(matrix: ClusterArrays) -> None:
    first = matrix.table(NAMES, REQUEST, {})
    expected = content(first)
    matrix.table(NAMES, REQUEST, {})  # shares the arrays too, and is dropped at once
    matrix.put(Node("n0"), card(400))
    second = matrix.table(NAMES, REQUEST, {})
    matrix.put(Node("n0"), card(500))
    assert content(first) == expected
    assert content(second)[0] == ("n0", 600, card(400))


def test_cards_assumed_for_one_table_are_in_no_other(matrix: ClusterArrays) -> None:
    assumed = matrix.table(NAMES, REQUEST, {"n0": card(400)})
    other = matrix.table(NAMES, REQUEST, {"n1": card(700)})
    assert [row[1] for row in content(assumed)] == [600, 1000]
    assert [row[1] for row in content(other)] == [1000, 300]


def test_arrays_are_copied_only_while_a_table_is_in_use(matrix: ClusterArrays) -> None:
    """A copy of thousands of nodes for each change would cost as much as the filter itself."""
    data = matrix.table(NAMES, REQUEST, {}).rows.data.base
    matrix.put(Node("n0"), card(400))
    in_use = matrix.table(NAMES, REQUEST, {})
    assert in_use.rows.data.base is data
    matrix.put(Node("n0"), card(500))
    assert matrix.table(NAMES, REQUEST, {}).rows.data.base is not data
