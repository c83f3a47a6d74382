"""Thousands of states at once are worth what each of them is worth by the definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.learning import kind_tables, state_rating
from scheduler.engine.learning.card_tables import PodTypes
from scheduler.engine.learning.expected_pods import UNIT, weigh_types
from scheduler.engine.learning.kind_tables import MANY_PODS, Floats, Hosting, Shorts
from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import CARD, NEVER, Ints, NodeClass, Shape, needed_milli
from scheduler.engine.learning.state_rating import StateRating
from scheduler.engine.policies.fragmentation import Fragmentation
from tests.examples import examples
from tests.scheduler.engine.learning.clusters import CLASSES, GIB, SHAPES, Node, node_rows, nodes
from tests.scheduler.engine.learning.plain_worth import PlainType, plain_changes, plain_worth

SMALL, LARGE = NodeClass(40, 40, 2, "S", GIB), NodeClass(40, 40, 5, "L", 2 * GIB)
VALUES = [milli // 7 * 3 for milli in range(CARD + 1)]
MILLI = st.integers(1, CARD) | st.sampled_from((100, 200, 300, 500, 1000))


@dataclass
class MadeUp:
    """Types whose numbers are made up. On the class LARGE they take half of the milli, and weigh other amounts."""

    types: Sequence[PlainType]

    @property
    def cards(self) -> Ints:
        return np.array([kind.cards for kind in self.types], np.int64)

    def on(self, node: NodeClass) -> list[PlainType]:
        if node is not LARGE:
            return list(self.types)
        half = [NEVER if t.milli == NEVER else -(-t.milli // 2) for t in self.types]
        return [t._replace(milli=milli, fit=t.copy, copy=t.fit) for t, milli in zip(self.types, half, strict=True)]

    def milli(self, node: NodeClass) -> tuple[int, ...]:
        return tuple(kind.milli for kind in self.on(node))

    def weights(self, node: NodeClass) -> Floats:
        of_types = self.on(node)
        return np.array(([t.fit for t in of_types], [t.copy for t in of_types]), np.float64)

    def card_values(self, milli: Sequence[int]) -> Ints:
        assert len(milli) == len(self.types)
        return np.array(VALUES, np.int64)

    def hosting(self, order: Ints) -> Hosting:
        of_types = [self.types[i] for i in order.tolist()]

        def hosted(cpu: Ints, memory: Ints) -> Shorts:
            free = zip(cpu.tolist(), memory.tolist(), strict=True)
            pods = [[min(c // t.cpu, m // t.memory, MANY_PODS) for t in of_types] for c, m in free]
            return np.array(pods, np.int16).reshape(len(cpu), len(of_types))

        return hosted


a_type = st.builds(
    PlainType,
    cpu=st.sampled_from((1, 3, 8, 20)),
    memory=st.sampled_from((1, 5, 30)),
    cards=st.sampled_from((1, 1, 1, 2, 3)),
    milli=MILLI | st.just(NEVER),
    fit=st.integers(0, 1 << 20),
    copy=st.integers(0, 1 << 30) | st.just(0),
)


@st.composite
def a_state(draw: st.DrawFn) -> Node:
    kind = draw(st.sampled_from((SMALL, LARGE)))
    free = draw(st.lists(MILLI | st.just(0), min_size=kind.cards, max_size=kind.cards))
    amount = st.integers(0, 40) | st.just(1 << 40)
    return kind, draw(amount), draw(amount), tuple(free)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few states take the way of thousands: in several blocks, with a search for equal ones in each."""
    monkeypatch.setattr(state_rating, "_STATES_PER_BLOCK", 4)
    monkeypatch.setattr(kind_tables, "_MANY_ROWS", 2)


@pytest.mark.usefixtures("small_blocks")
@examples(25)
@given(
    st.lists(a_type, max_size=12),
    st.lists(a_state(), min_size=1, max_size=12),
    st.builds(
        Shape,
        cpu=st.sampled_from((0, 0, 2, 9)),
        memory=st.sampled_from((0, 0, 2)),
        cards=st.sampled_from((1, 1, 1, 0, 2)),
        core=MILLI,
        card_memory=st.sampled_from((0, GIB // 3, 2 * GIB)),
    ),
)
def test_property_worth_and_best_changes_equal_the_definition(
    types: list[PlainType], states: list[Node], shape: Shape
) -> None:
    made_up = MadeUp(types)
    rating = StateRating(made_up)
    states = [*states, *states[:3]]  # equal states are rated once
    rows = node_rows(*states)
    assert rating.worth(rows).tolist() == [plain_worth(made_up.on(node[0]), VALUES, node) for node in states]
    changes = [plain_changes(made_up.on(node[0]), VALUES, node, shape) for node in states]
    fitting = np.array([i for i, found in enumerate(changes) if found], np.int64)
    found = rating.best_changes(rows.select(fitting), shape, needed_milli(rows, shape)[fitting])
    assert found.tolist() == [max(of_cards.values()) for of_cards in changes if of_cards]


def test_states_with_the_same_number_are_still_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_rating, "_FACTORS", np.zeros(63, np.int64))
    types = MadeUp([PlainType(1, 1, 1, 400, 1, 10)])
    states: list[Node] = [(SMALL, 9, 9, (1000, 500)), (SMALL, 9, 9, (350, 700)), (SMALL, 9, 9, (500, 1000))]
    shape = Shape(0, 0, 1, 300)
    rows = node_rows(*states)
    found = StateRating(types).best_changes(rows, shape, needed_milli(rows, shape))
    changes = [plain_changes(types.on(SMALL), VALUES, node, shape) for node in states]
    assert found.tolist() == [max(of_cards.values()) for of_cards in changes if of_cards]
    assert len(set(found.tolist())) == 2


COUNTS = tuple((shape, UNIT * (10 + i)) for i, shape in enumerate(SHAPES))
JUDGE = Fragmentation(COUNTS, dict.fromkeys(CLASSES, 5))
POD_TYPES = PodTypes(weigh_types(COUNTS, dict.fromkeys(CLASSES, 5)))


@pytest.mark.usefixtures("small_blocks")
@examples(40)
@given(st.lists(nodes(), min_size=1, max_size=10), st.sampled_from(SHAPES))
def test_property_keys_of_fragmentation_equal_the_definition(cluster: list[Node], shape: Shape) -> None:
    keys = []
    for node in cluster:
        milli = POD_TYPES.milli(node[0])
        fit, copy = POD_TYPES.weights(node[0]).astype(np.int64).tolist()
        needs = zip(POD_TYPES._cpu, POD_TYPES._memory, POD_TYPES.cards.tolist(), milli, fit, copy, strict=True)
        types = [PlainType(int(cpu), int(memory), *rest) for cpu, memory, *rest in needs]
        changes = plain_changes(types, POD_TYPES.card_values(milli).tolist(), node, shape)
        if changes is None:
            keys.append(UNFIT)
            continue
        left = sum(node[3]) - shape.cards * int(needed_milli(node_rows(node), shape)[0])
        keys.append(max(changes.values()) // ((1 << 30) // 100) * (1 << 20) - left)
    assert JUDGE.keys(node_rows(*cluster), shape).tolist() == keys
