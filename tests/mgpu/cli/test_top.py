"""`mgpu top`: the figures, and the command against an API server."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from mgpu.cli.kubectl import NAMES, plugin
from mgpu.cli.main import main
from mgpu.cli.top_view import free_line
from mgpu.model.cards import CardState
from mgpu.model.device_object import write_device
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MIG
from mgpu.presentation import utilization
from mgpu.presentation.card_views import CardView, NodeView
from mgpu.presentation.overview import Overview, make_overview
from mgpu.presentation.utilization import SORTS, Fragmentation
from mgpu.settings import load_settings
from tests.builders import GIB, card, cards, container, node, pod, share
from tests.mgpu.cli.served import served
from tests.scheduler.explained_cluster import fill

RECORD = "vke.volcengine.com/gpu-index-container-c"


def found() -> Overview:
    """n1: card 0 half used, card 1 without core, card 2 unhealthy; n2: one of two cards taken whole; n3: no cards."""
    own = {"n1": (card(0), card(1), card(2, healthy=False)), "n2": cards(2, gib=40, node="n2"), "n3": ()}
    nodes = [node(name) for name in own]
    devices = [write_device(read_node(raw), "u", own[raw["metadata"]["name"]]) for raw in nodes[:2]]

    def on(name: str, where: str, index: str, *amounts: int) -> dict[str, object]:
        record = {RECORD: index, "vke.volcengine.com/assumed": "true"}
        return pod(name, container("c", *amounts), node=where, annotations=record)

    pods = [on("a", "n1", "0", 50, 20 * 1024), on("b", "n1", "1", 60, 1024), on("c", "n1", "1", 40, 1024)]
    pods += [on("d", "n2", "1", 100), share("waits")]
    return make_overview(nodes, devices, pods, load_settings())


def test_figures_of_nodes_and_models_are_sums_of_their_cards() -> None:
    rows = {row.name: row for row in utilization.by_node(found().nodes)}
    first, second = rows["n1"], rows["n2"]
    assert list(rows) == ["n1", "n2"]
    assert (first.cards, first.idle, first.unhealthy, first.core_used, first.core) == (3, 0, 1, 1500, 3000)
    assert (second.cards, second.idle, second.memory_used, second.memory) == (2, 1, 40 * GIB, 80 * GIB)
    (model,) = utilization.by_model(found().nodes)
    assert (model.name, model.nodes, model.cards) == ("A100-SXM4-80GB", 2, 5)


def test_free_line_describes_the_free_capacity() -> None:
    free = utilization.fragmentation(found().nodes)
    assert (free.idle, free.idle_core, free.idle_memory) == (1, 1000, 40 * GIB)
    assert (free.part, free.part_core, free.most_core, free.most_memory) == (1, 500, 500, 60 * GIB)
    assert (free.useless_core, free.useless_memory) == (0, 78 * GIB)
    assert free_line(free) == (
        "Free: 1 idle card; 50% and 60.0 GiB on 1 part-used card (at most 50% and 60.0 GiB on one); "
        "78.0 GiB where the rest of the card is taken, so that no share of core and memory fits"
    )
    assert free_line(Fragmentation()) == "Free: nothing"
    assert free_line(Fragmentation(partitioned=2)) == "Free: nothing (2 partitioned cards not counted)"


def test_partitioned_cards_are_counted_separately() -> None:
    whole, cut, broken = (CardView(CardState(card(i, healthy=i < 2)), mode=MIG if i else "") for i in range(3))
    free = utilization.fragmentation([NodeView("n1", (whole, cut, broken))])
    assert (free.idle, free.partitioned) == (1, 1)


@pytest.mark.parametrize(("gib", "shown"), [(80, "80.0 GiB"), (1140, "1,140.0 GiB"), (3_200_000, "3,125.0 TiB")])
def test_large_amounts_have_separators_and_larger_units(gib: int, shown: str) -> None:
    assert free_line(Fragmentation(useless_memory=gib * GIB)).startswith(f"Free: {shown} where")


def test_holders_are_sorted_by_their_holdings() -> None:
    rows = [(row.pod, row.core, row.nodes) for row in utilization.holders(found().nodes)]
    assert rows == [
        ("default/d", 1000, ("n2",)),
        ("default/b", 600, ("n1",)),
        ("default/a", 500, ("n1",)),
        ("default/c", 400, ("n1",)),
    ]


@pytest.mark.parametrize("sort", sorted(SORTS))
def test_every_sort_order_ends_in_the_name(sort: str) -> None:
    twins = [utilization.add(name, ()) for name in "cab"]
    assert [row.name for row in sorted(twins, key=SORTS[sort])] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("sort", "first"), [("core", "n2"), ("memory", "n2"), ("name", "n1"), ("cards", "n1"), ("idle", "n2")]
)
def test_top_sorts_by_the_option(sort: str, first: str) -> None:
    assert min(utilization.by_node(found().nodes), key=SORTS[sort]).name == first


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("api"), fill) as kubeconfig:
        yield kubeconfig


def top(kubeconfig: str, *arguments: str) -> Result:
    return CliRunner().invoke(plugin, ["top", "--kubeconfig", kubeconfig, *arguments])


def test_top_json_has_all_figures(kubeconfig: str) -> None:
    result = top(kubeconfig, "-o", "json", "--sort", "name")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [row["name"] for row in answer["nodes"]] == ["n1", "n2"]
    assert (answer["cluster"]["cards"], answer["pending"], answer["gated"]) == (4, 7, 1)
    assert answer["cluster"]["core"] == {"used": 80, "total": 400}
    assert answer["holders"][0]["pod"] == "default/holder"
    assert answer["fragmentation"]["idle"]["cards"] == 1


def test_top_prints_tables(kubeconfig: str) -> None:
    lines = top(kubeconfig, "--limit", "1").stdout.splitlines()
    assert lines[:2] == [
        "2 nodes, 4 cards (1 idle); 6 GPU pods waiting, 1 gated",
        "core 20% of 400%, memory 19% of 320.0 GiB",
    ]
    assert "… and 1 more (--limit)" in lines


def test_top_with_invalid_options_is_an_input_error(kubeconfig: str) -> None:
    assert top(kubeconfig, "--sort", "colour").exit_code == 2
    assert top("/nowhere/kubeconfig").exit_code == 2


def test_every_command_of_the_plugin_is_a_command_of_mgpu() -> None:
    for name in sorted({*NAMES} - {"completion"}):
        for program in (plugin, main):
            result = CliRunner().invoke(program, [name, "--help"])
            assert result.exit_code == 0, result.output
            assert "Examples:" in result.output
            for option in ("--kubeconfig", "--context", "-o, --output"):
                assert option in result.output, name
    assert CliRunner().invoke(plugin, ["webhook"]).exit_code == 2
    listed = CliRunner().invoke(plugin, []).output
    assert "doctor" in listed
    assert "deviceplugin" not in listed
