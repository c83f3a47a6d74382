"""The figures of `mgpu top` are those of the plain sums over all cards."""

import random

import pytest

from mgpu.model.cards import CardState
from mgpu.presentation import utilization
from mgpu.presentation.utilization import UNKNOWN_MODEL, Figures, Holder
from tests.mgpu.presentation.test_card_map_is_plain import some_node


def plain(name: str, nodes: int, states: list[CardState]) -> Figures:
    return Figures(
        name,
        nodes,
        len(states),
        sum(s.idle and s.card.healthy for s in states),
        sum(not s.card.healthy for s in states),
        sum(min(s.core_used, s.card.core) for s in states),
        sum(s.card.core for s in states),
        sum(min(s.memory_used, s.card.memory) for s in states),
        sum(s.card.memory for s in states),
        tuple(sorted({s.card.model or UNKNOWN_MODEL for s in states})),
    )


@pytest.mark.parametrize("seed", range(10))
def test_figures_are_plain_sums(seed: int) -> None:
    pick = random.Random(seed)
    nodes = [some_node(pick) for _ in range(6)]
    served = [node for node in nodes if node.cards]
    states = {id(node): [view.state for view in node.cards] for node in served}
    rows = utilization.by_node(nodes)
    assert rows == [plain(node.name, 1, states[id(node)]) for node in served]
    everything = [state for node in served for state in states[id(node)]]
    assert utilization.add("cluster", rows) == plain("cluster", len(served), everything)
    for row in utilization.by_model(nodes):
        of_model = [[s for s in found if (s.card.model or UNKNOWN_MODEL) == row.name] for found in states.values()]
        assert row == plain(row.name, sum(map(bool, of_model)), [s for found in of_model for s in found])


@pytest.mark.parametrize("seed", range(10))
def test_holders_are_plain_sums(seed: int) -> None:
    pick = random.Random(seed)
    nodes = [some_node(pick) for _ in range(6)]
    held = [(node.name, use) for node in nodes for card in node.cards for use in card.uses if use.certain]
    plainly = []
    for pod in {use.pod for _, use in held}:
        own = [(name, use) for name, use in held if use.pod == pod]
        names = tuple(sorted({name for name, _ in own}))
        core, memory = sum(use.core for _, use in own), sum(use.memory for _, use in own)
        plainly.append(Holder(pod, own[0][1].dialect, names, len(own), core, memory))
    assert utilization.holders(nodes) == sorted(plainly, key=lambda row: (-row.core, -row.memory, row.pod))
