"""What a pod takes of a card on one kind of node."""

import pytest

from scheduler.engine.learning.shapes import NodeClass, Shape, milli_per_card

GIB = 1 << 30
NODE = NodeClass(8000, 64 * GIB, 2, "T4", 16 * GIB)


@pytest.mark.parametrize(
    ("shape", "milli"),
    [
        pytest.param(Shape(1, 1), 0, id="no card"),
        pytest.param(Shape(1, 1, 1, 300), 300, id="core"),
        pytest.param(Shape(1, 1, 1, 300, 8 * GIB), 500, id="the scarcer of core and memory"),
        pytest.param(Shape(1, 1, 1, 0, 16 * GIB // 3), 333, id="memory alone, rounded down as free memory is"),
        pytest.param(Shape(1, 1, 1), 1, id="a share of nothing still counts"),
        pytest.param(Shape(1, 1, 1, 1000, 17 * GIB), None, id="more memory than a card has"),
        pytest.param(Shape(1, 1, 3, 100), None, id="more cards than the node has"),
        pytest.param(Shape(1, 1, 1, 300, models=("A100",)), None, id="another model"),
        pytest.param(Shape(1, 1, 1, 300, models=("A100", "T4")), 300, id="one of the models"),
    ],
)
def test_what_a_pod_takes_of_a_card(shape: Shape, milli: int | None) -> None:
    assert milli_per_card(shape, NODE) == milli


def test_a_node_that_does_not_say_its_memory_cannot_share_it() -> None:
    assert milli_per_card(Shape(1, 1, 1, 0, GIB), NODE._replace(card_memory=0)) is None
