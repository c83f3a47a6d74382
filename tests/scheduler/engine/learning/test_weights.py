import pytest

from scheduler.engine.learning.expected_pods import ONE, UNIT, WeightedType, pods_per_empty_node, weigh_types
from scheduler.engine.learning.shapes import NodeClass, Shape
from tests.scheduler.engine.learning.clusters import GIB

T4, BIG = NodeClass(8000, 64 * GIB, 2, "T4", 16 * GIB), NodeClass(96000, 512 * GIB, 8, "A100", 80 * GIB)
CLASSES = {T4: 3, BIG: 100}
ANYWHERE, BOUND = Shape(1000, GIB, 1, 500), Shape(1000, GIB, 1, 500, models=("T4",))
MANY = 5000 * UNIT


def of(weighed: tuple[WeightedType, ...], shape: Shape) -> WeightedType:
    return next(one for one in weighed if one.shape == shape)


def test_copies_by_cards_cpu_and_memory() -> None:
    assert pods_per_empty_node(Shape(1000, GIB, 1, 300), BIG) == 24
    assert pods_per_empty_node(Shape(11000, GIB, 1, 300), BIG) == 8
    assert pods_per_empty_node(Shape(1000, 200 * GIB, 1, 300), BIG) == 2
    assert pods_per_empty_node(Shape(1000, GIB, 3, 1000), BIG) == 2
    assert pods_per_empty_node(Shape(1000, GIB, 1, 0, 8 * GIB), T4) == 4
    assert (
        pods_per_empty_node(BOUND, BIG)
        == pods_per_empty_node(Shape(0, 0, 4, 1000), T4)
        == pods_per_empty_node(Shape(1000, GIB), BIG)
        == 0
    )


def test_what_can_go_to_few_nodes_counts_more_than_what_is_popular() -> None:
    weighed = weigh_types([(ANYWHERE, 2 * MANY), (BOUND, MANY)], CLASSES)
    assert of(weighed, BOUND).fit_weight > 5 * of(weighed, ANYWHERE).fit_weight
    assert of(weighed, BOUND).copy_weight > 5 * of(weighed, ANYWHERE).copy_weight


def test_weights_add_up_whatever_the_scale_of_the_counts() -> None:
    for scale in (1, 7):
        weighed = weigh_types([(ANYWHERE, scale * MANY), (BOUND, MANY)], CLASSES)
        assert sum(one.fit_weight for one in weighed) == pytest.approx(ONE)
        assert sum(one.copy_weight for one in weighed) == pytest.approx(ONE * 0.5)  # the mean pod: half a card


def test_of_rare_pods_more_are_expected_than_were_seen() -> None:
    weighed = weigh_types([(ANYWHERE, 10_000 * UNIT), (BOUND, 4 * UNIT)], CLASSES)
    assert of(weighed, BOUND).number == 8
    assert of(weighed, ANYWHERE).number == 10_200


def test_whole_nodes_are_kept_until_enough_was_seen() -> None:
    unseen = Shape(BIG.cpu, BIG.memory, 8, 1000)
    assert [one.shape for one in weigh_types([], CLASSES)] == [unseen]
    early, later = (of(weigh_types([(ANYWHERE, n * UNIT)], CLASSES), unseen).number for n in (10, 900))
    assert early > later > 0
    assert unseen not in [one.shape for one in weigh_types([(ANYWHERE, 1000 * UNIT)], CLASSES)]


def test_nothing_seen_and_no_nodes() -> None:
    assert weigh_types([], {}) == ()
    assert weigh_types([(Shape(1000, GIB), UNIT)], {NodeClass(4000, GIB, 0): 1}) == ()  # neither wants a card
    assert [one.shape for one in weigh_types([(BOUND, MANY)], {BIG: 1})] == [BOUND]  # where it may run is not there yet


def test_the_number_of_types_is_bounded_and_the_order_of_counts_does_not_matter() -> None:
    counts = [(Shape(cpu, GIB, 1, 500), MANY) for cpu in range(1, 400)]
    weighed = weigh_types(counts, CLASSES)
    assert len(weighed) == 256
    assert weigh_types(reversed(counts), CLASSES) == weighed
    assert weigh_types(counts, dict(reversed(CLASSES.items()))) == weighed
