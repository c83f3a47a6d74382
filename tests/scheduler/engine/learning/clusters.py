"""Made-up nodes and pods for the judges of fragmentation."""

from collections.abc import Sequence

from hypothesis import strategies as st

from scheduler.engine.learning.node_board import NodeBoard
from scheduler.engine.learning.shapes import NodeClass, NodeRows, Shape

GIB = 1 << 30
CLASSES = (
    NodeClass(8000, 64 * GIB, 2, "T4", 16 * GIB),
    NodeClass(32000, 256 * GIB, 4, "A100", 80 * GIB),
    NodeClass(4000, 16 * GIB, 0),
)
SHAPES = (
    Shape(2000, GIB),
    Shape(1000, GIB, 1, 300),
    Shape(4000, 8 * GIB, 1, 500, models=("A100", "V100")),
    Shape(1000, GIB, 1, 0, 16 * GIB),
    Shape(2000, GIB, 1, 1000),
    Shape(2000, GIB, 2, 400),
    Shape(6000, 32 * GIB, 2, 1000),
    Shape(8000, 32 * GIB, 4, 1000, models=("A100",)),
)

Node = tuple[NodeClass, int, int, tuple[int, ...]]
"""(class, free cpu, free memory, free milli of its cards)"""


def board_of(*nodes: Node) -> NodeBoard:
    board = NodeBoard()
    for row, node in enumerate(nodes):
        board.put(row, *node)
    return board


def node_rows(*nodes: Node) -> NodeRows:
    return board_of(*nodes).rows(range(len(nodes)))


@st.composite
def nodes(draw: st.DrawFn, classes: Sequence[NodeClass] = CLASSES) -> Node:
    """A node that is part used."""
    node = draw(st.sampled_from(classes))
    free = draw(st.lists(st.sampled_from((0, 200, 300, 500, 700, 1000)), min_size=node.cards, max_size=node.cards))
    return node, draw(st.integers(0, 8)) * node.cpu // 8, draw(st.integers(0, 4)) * node.memory // 4, tuple(free)
