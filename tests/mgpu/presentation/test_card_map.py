"""The card map on a terminal without colour."""

import pytest
from rich.console import Console

from mgpu.model.cards import Card, CardState
from mgpu.model.device_object import write_device
from mgpu.model.pods import read_node
from mgpu.model.slice_names import Slice
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import CardUse, CardView, NodeView, SliceView
from mgpu.presentation.overview import make_overview
from mgpu.settings import load_settings
from tests.builders import card, node, share

CARDS = (card(0), card(1), card(2, healthy=False))


def drawn(width: int) -> str:
    def on(name: str, index: str) -> dict[str, object]:
        return share(name, node="n1", annotations={"vke.volcengine.com/gpu-index-container-c": index}, mib=40960)

    device = write_device(read_node(node()), "", CARDS)
    found = make_overview([node(), node("bare")], [device], [on("one", "0"), on("two", "0")], load_settings())
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(card_map(found.nodes))
    return captured.get()


def test_card_map_has_bars_legend_and_totals() -> None:
    text = drawn(80)
    for part in ("n1 · 3 × A100-SXM4-80GB 80 GiB", "100% 80 GiB", "1 idle", "2 ✗ unhealthy", "Without cards: bare"):
        assert part in text
    assert "A default/one · 50% 40 GiB on 0" in text
    assert text.splitlines()[-1] == "1 node · 3 cards · 1 idle · 1 unhealthy · 2 pods"


def test_bar_of_a_full_card_is_divided_between_its_pods() -> None:
    core = next(line for line in drawn(80).splitlines() if line.startswith("│ core"))
    bar = core.split()[2]
    assert set(bar) == {"A", "B"}
    assert abs(bar.count("A") - bar.count("B")) <= 1


def test_bar_of_a_card_with_free_capacity_is_not_full() -> None:
    nearly = CardView(CardState(card(0), 999, 79 << 30, 1), (use("a", "mgpu", 999, 79),))
    text = shown(NodeView("n1", (nearly,)))
    core = next(line for line in text.splitlines() if line.startswith("│ core"))
    assert set(core.split()[2]) > {"A"}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_lines_of_the_card_map_fit_the_terminal(width: int) -> None:
    assert max(map(len, drawn(width).splitlines())) <= width


def test_card_map_names_several_vocabularies_and_other_devices() -> None:
    one = CardView(CardState(card(0), 300, 24 << 30, 2), (use("a", "mgpu", 300, 4), use("b", "gpushare", 0, 20)))
    rdma = Card(1, "mlx5_1", "", 0, type="rdma")
    other = CardView(CardState(rdma, 500, 0, 1), (use("c", "koordinator", 500, 0),))
    idle = CardView(CardState(Card(0, "mlx5_0", "", 0, type="rdma")))
    text = shown(NodeView("n1", (one,), others=(idle, other)))
    for part in ("a · mgpu · 30% 4 GiB on 0", "b · gpushare · 20 GiB on 0", "c · koordinator · rdma 50% on 1"):
        assert part in text
    assert "rdma   0 idle   1 50% C" in text
    alone = shown(NodeView("n1", (CardView(one.state, one.uses[:1]),)))
    assert "a · 30% 4 GiB on 0" in alone


def use(pod: str, dialect: str, core: int, gib: int) -> CardUse:
    return CardUse(pod, ("c",), core, gib << 30, dialect=dialect)


def shown(node: NodeView) -> str:
    console = Console(width=100, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(card_map([node]))
    return captured.get()


def cut(kind: str, index: int, *made: Slice, held: str = "") -> CardView:
    """Return a card of 80 GiB with these slices; `held` holds the first."""
    uses = (CardUse(held, ("c",), 142, 10 << 30),) if held else ()
    slices = [SliceView(s, CardState(Card(s.index, "", "", 20 << 30)), () if i else uses) for i, s in enumerate(made)]
    core, memory = (142, 10 << 30) if held else (0, 0)
    return CardView(CardState(card(index), core, memory, len(uses)), uses, kind, tuple(slices))


def test_mig_instances_are_drawn_at_their_position() -> None:
    instances = (Slice(0, 4, "2g.20gb"), Slice(0, 0, "3g.40gb"), Slice(0, 6, "1g.10gb"))
    text = shown(NodeView("n1", (cut("mig", 0, instances[0], held="a"), cut("mig", 1)), note="plan 5 is under way"))
    head, _, mem, names = text.splitlines()[1:5]
    assert "0 MIG 14.2% 10 GiB" in head
    assert "1 MIG idle" in head
    bar, line = mem[9:43], names[9:43]
    assert (bar.index("A"), bar.count("A")) == (17, 8)  # it begins after half of 34 cells and has a quarter
    assert (line.strip(), line.index("▏")) == ("▏2g.20gb", 17)
    for part in ("A a · 2g.20gb of card 0 · 14.2% 10 GiB", "plan 5 is under way"):
        assert part in text


def test_mps_shares_are_drawn_one_after_another() -> None:
    text = shown(NodeView("n1", (cut("mps", 0, Slice(0, 0, "20gb"), Slice(0, 1, "20gb"), held="a"),)))
    _, _, mem, names = text.splitlines()[1:5]
    assert mem[9:43].rstrip("·") == "A" * 8
    assert names[9:43].split() == ["▏20gb", "▏20gb"]
