"""The card map that composes its own lines is, character by character, the one that `rich` would draw."""

import random
from dataclasses import replace

import pytest
from rich.console import RenderableType
from rich.segment import Segments
from rich.style import Style
from rich.text import Text

from mgpu.model.cards import Card, CardState
from mgpu.model.pod_constraints import Constraints
from mgpu.model.slice_names import MIG, MPS, Slice
from mgpu.presentation.card_bars import divide_cells
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import CardUse, CardView, NodeView, SliceView
from mgpu.presentation.terminal import Terminal
from tests.mgpu.presentation import plain_card_map

GIB = 1 << 30
PODS = [f"default/{name}" for name in ("a", "long-name-of-a-pod-0123456789", "b", "c-7f9d", "d", "e", "名前", "f")]


def drawn(map_: RenderableType, width: int, *, coloured: bool, ascii_only: bool) -> list[tuple[str, Style]]:
    """Return each character with its style."""
    terminal = Terminal(width=width, force_terminal=coloured, color_system="truecolor" if coloured else None)
    options = terminal.options.update(width=width)
    options.encoding = "ascii" if ascii_only else "utf-8"
    with terminal.capture() as captured:
        terminal.print(Segments(terminal.render(map_, options)), crop=False, end="")
    if not coloured:
        return [(letter, Style.null()) for letter in captured.get()]
    segments = Text.from_ansi(captured.get(), tab_size=1).render(terminal)
    return [(letter, segment.style or Style.null()) for segment in segments for letter in segment.text]


def some_use(pick: random.Random, pods: list[str]) -> CardUse:
    return CardUse(
        pick.choice(pods),
        tuple(pick.sample(["c", "d", "sidecar"], pick.randrange(3))),
        pick.randrange(0, 1000, 5),
        pick.randrange(80) * GIB,
        certain=pick.random() < 0.9,
        constraints=pick.choice([Constraints(), Constraints(models=("A100-SXM4-80GB", "H100-80GB-HBM3", "L40S"))]),
        dialect=pick.choice(["mgpu", "gpushare", "mtgpu", ""]),
        occupies=pick.choice(["", "", "", "gpuid"]),
    )


def some_card(pick: random.Random, index: int, pods: list[str], type_: str = "gpu") -> CardView:
    model = pick.choice(["A100-SXM4-80GB", "NVIDIA L40S", "", "显卡", "a\x1b[2Jb"])
    card = Card(index, f"U-{index}", model, pick.choice([0, 24, 80]) * GIB, healthy=pick.random() < 0.8, type=type_)
    uses = tuple(some_use(pick, pods) for _ in range(pick.choice([0, 0, 1, 1, 2, 3, 9])))
    core, memory = sum(u.core for u in uses), sum(u.memory for u in uses)
    gpuid = pick.choice(["", "", "zxcvb", "a-very-long-gpuid-of-a-user-who-likes-them"])
    view = CardView(CardState(card, core, memory, len(uses), gpuid=gpuid), uses)
    return partitioned(pick, view, pods) if type_ == "gpu" and card.memory and pick.random() < 0.2 else view


def partitioned(pick: random.Random, view: CardView, pods: list[str]) -> CardView:
    mode = pick.choice([MIG, MPS])
    names = ["1g.10gb", "2g.20gb"] if mode == MIG else ["10gb", "20gb"]
    slices = []
    for start in range(pick.randrange(5)):
        device = Card(start, f"S-{start}", "", 10 * GIB)
        uses = (some_use(pick, pods),) if pick.random() < 0.5 else ()
        made = Slice(view.state.card.index, start, pick.choice(names))
        slices.append(SliceView(made, CardState(device), uses))
    return replace(view, mode=mode, slices=tuple(slices))


def some_node(pick: random.Random) -> NodeView:
    pods = pick.sample(PODS, pick.randrange(1, len(PODS)))
    if pick.random() < 0.1:
        pods = [f"default/p{i}" for i in range(80)]
    cards = tuple(some_card(pick, i, pods) for i in range(pick.choice([0, 1, 2, 3, 4, 8, 16])))
    others = tuple(some_card(pick, i, pods, "rdma") for i in range(pick.choice([0, 0, 0, 1, 3])))
    note = pick.choice(["", "", f"plan 3 was refused: {'because of this ' * pick.randrange(1, 12)}"])
    name = pick.choice(["node-1", "n" * 90, "ノード"])
    return NodeView(name, cards, others=others, note=note)


@pytest.mark.parametrize("coloured", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_the_map_is_the_plain_one(seed: int, coloured: bool) -> None:
    pick = random.Random(seed)
    nodes = [some_node(pick) for _ in range(3)]
    for width in (60, 80, pick.randrange(60, 200)):
        for ascii_only in (False, True):
            found, plain = (
                drawn(made(nodes), width, coloured=coloured, ascii_only=ascii_only)
                for made in (card_map, plain_card_map.card_map)
            )
            assert "".join(letter for letter, _ in found) == "".join(letter for letter, _ in plain)
            assert found == plain


def test_cells_are_those_of_exact_fractions() -> None:
    pick = random.Random(0)
    for _ in range(3000):
        amounts = [pick.choice([0, pick.randrange(12), pick.randrange(10**11)]) for _ in range(pick.randrange(7))]
        total, width = pick.choice([0, 7, 1000, 80 * GIB]), pick.randrange(1, 40)
        assert divide_cells(amounts, total, width) == plain_card_map._cells(amounts, total, width)
