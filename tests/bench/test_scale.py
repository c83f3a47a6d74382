import gc

from bench.rows import Options
from bench.scale import NODES, PODS_EACH, PODS_NODES, POLICIES, _measure, clusters, what


def test_every_cluster_is_named_differently() -> None:
    found = clusters(Options())
    assert len(found) == len(set(found)) == len(NODES) + len(PODS_EACH)
    assert (PODS_NODES, PODS_EACH[-1]) in found


def test_numbers_of_nodes_replace_all_clusters() -> None:
    assert clusters(Options((3,))) == [(3, 8)]


def test_a_cluster_has_a_figure_for_each_policy_and_kind_of_pod() -> None:
    found = _measure(3, 32)
    gc.unfreeze()  # In the benchmark the process ends.
    assert {name for name in found if POLICIES[-1] in name} == {
        what(3, 32, "a kind of pod that came before", POLICIES[-1]),
        what(3, 32, "a new kind of pod", POLICIES[-1]),
    }
    assert all(value > 0 for value in found.values())
