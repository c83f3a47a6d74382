"""A table of nodes is a snapshot that later changes of the arrays do not affect."""

import pytest

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.pods import Node
from mgpu.settings import load_settings
from scheduler.cluster import cluster_queries
from scheduler.cluster.arrays import ClusterArrays
from scheduler.cluster.cache import ClusterCache
from scheduler.engine.arrays.node_table import CORE_FREE, NodeTable
from tests import builders as b
from tests.builders import GIB

REQUEST = GpuRequest("mgpu", (ContainerRequest("c", 1, 100, GIB),))
NAMES = ["n0", "n1"]


def card(used: int) -> tuple[CardState, ...]:
    return (CardState(Card(0, "GPU-0", "", 8 * GIB), used, GIB if used else 0, 1 if used else 0),)


@pytest.fixture
def arrays() -> ClusterArrays:
    made = ClusterArrays()
    for name in NAMES:
        made.put(Node(name), card(0))
    return made


def content(table: NodeTable) -> list[tuple[str, int, tuple[CardState, ...]]]:
    return [
        (table.nodes[at].name, int(table.rows.data[CORE_FREE, at, 0]), table.cards[at])
        for at in table.rows_of_names.tolist()
    ]


def test_table_does_not_change_when_nodes_do(arrays: ClusterArrays) -> None:
    before = arrays.table(NAMES, REQUEST, {})
    expected = content(before)
    arrays.put(Node("n0"), card(400))
    arrays.drop("n1")
    arrays.put(Node("n2"), card(700))  # It gets the row of n1.
    assert content(before) == expected
    assert content(arrays.table(["n0", "n2"], REQUEST, {})) == [("n0", 600, card(400)), ("n2", 300, card(700))]


def test_tables_in_use_at_the_same_time_do_not_change_when_nodes_do(arrays: ClusterArrays) -> None:
    first = arrays.table(NAMES, REQUEST, {})
    expected = content(first)
    arrays.table(NAMES, REQUEST, {})  # It shares the arrays too, and is deleted at once.
    arrays.put(Node("n0"), card(400))
    second = arrays.table(NAMES, REQUEST, {})
    arrays.put(Node("n0"), card(500))
    assert content(first) == expected
    assert content(second)[0] == ("n0", 600, card(400))


def test_cards_that_replace_the_stored_ones_are_in_no_other_table(arrays: ClusterArrays) -> None:
    assumed = arrays.table(NAMES, REQUEST, {"n0": card(400)})
    other = arrays.table(NAMES, REQUEST, {"n1": card(700)})
    assert [row[1] for row in content(assumed)] == [600, 1000]
    assert [row[1] for row in content(other)] == [1000, 300]


def test_arrays_are_copied_only_while_a_table_is_in_use(arrays: ClusterArrays) -> None:
    """A copy of thousands of nodes for each change would take as long as the filter."""
    data = arrays.table(NAMES, REQUEST, {}).rows.data.base
    arrays.put(Node("n0"), card(400))
    in_use = arrays.table(NAMES, REQUEST, {})
    assert in_use.rows.data.base is data
    arrays.put(Node("n0"), card(500))
    assert arrays.table(NAMES, REQUEST, {}).rows.data.base is not data


def test_the_cache_takes_in_many_changed_nodes_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and events get the lock between two parts."""
    monkeypatch.setattr(cluster_queries, "NODES_PER_LOCK", 2)
    state = ClusterCache(load_settings())
    for i in range(5):
        state.node_changed(b.node(f"n{i}"))
    is_locked: list[bool] = []
    monkeypatch.setattr(cluster_queries, "pause", lambda: is_locked.append(state._lock._is_owned()))  # type: ignore[attr-defined]
    state.refresh()
    assert is_locked == [False, False]
    assert sorted(state._snapshots._arrays._rows) == [f"n{i}" for i in range(5)]
