"""The board remembers what did not change, and only that."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.learning.node_board import UNFIT, NodeBoard
from scheduler.engine.learning.shapes import Ints, NodeRows, Shape
from scheduler.engine.policies.fgd import Fgd, TypicalPod
from tests.examples import examples
from tests.scheduler.engine.learning.clusters import CLASSES, SHAPES, Node, node_rows, nodes

TYPICAL = tuple(TypicalPod(shape, 1 + i) for i, shape in enumerate(SHAPES))


class Counting(Fgd):
    """Notes how many rows it was asked for."""

    asked = 0

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        self.asked += len(rows.class_index)
        return super().keys(rows, shape)


@examples(20)
@given(st.lists(st.tuples(st.integers(0, 4), st.none() | nodes(), st.sampled_from(SHAPES)), max_size=20))
def test_property_keys_equal_those_of_the_present_nodes(
    steps: list[tuple[int, Node | None, Shape]],
) -> None:
    board, judge, there = NodeBoard(), Fgd(TYPICAL), dict[int, Node]()
    for row, node, shape in steps:
        if node:
            board.put(row, *node)
            there[row] = node
        elif row in there:
            board.drop(row)
            del there[row]
        keys = board.keys(judge, shape)
        assert len(keys) >= max(there, default=-1) + 1
        expected = {row: int(judge.keys(node_rows(node), shape)[0]) for row, node in there.items()}
        assert {row: key for row, key in enumerate(keys.tolist()) if key != UNFIT} == {
            row: key for row, key in expected.items() if key != UNFIT
        }


def test_only_changed_nodes_are_rated_again() -> None:
    board, judge = NodeBoard(), Counting(TYPICAL)
    node: Node = (CLASSES[0], 8000, 1 << 36, (1000, 1000))
    for row in range(3):
        board.put(row, *node)
    first = board.keys(judge, SHAPES[1])
    assert judge.asked == 3
    board.put(1, CLASSES[0], 8000, 1 << 36, (0, 0))
    after = board.keys(judge, SHAPES[1])
    assert judge.asked == 4
    assert after.tolist()[:3] == [first[0], UNFIT, first[2]]
    assert board.keys(Fgd(TYPICAL), SHAPES[1]).tolist() == after.tolist()
