"""Text from the cluster is printed without control characters and without interpretation as markup."""

import json
from collections.abc import Iterator
from io import StringIO

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mgpu.cli.inspect_gpushare import main as inspect_gpushare
from mgpu.cli.kubectl import plugin
from mgpu.kube import Api
from mgpu.presentation.plain_tables import core_cell, memory_cell, table_lines
from mgpu.presentation.plain_text import one_line, printable
from mgpu.presentation.terminal import Terminal, show, show_plain, show_yaml
from mgpu.version import AGENT_ANNOTATION
from tests.builders import share
from tests.mgpu.cli.installation import Installation
from tests.mgpu.cli.served import served
from tests.scheduler.explained_cluster import MTGPUPODS, PODS, fill

EVIL = "[red]x[/nope] :boom: \x1b]0;title\x07\x1b[2J\x9b2J\u202e\r\x7f\nok a further line"
SHOWN = "[red]x[/nope] :boom: "


def test_control_characters_are_replaced() -> None:
    assert printable("Zürich 卡 ✓\n2") == "Zürich 卡 ✓\n2"
    assert printable("a\x1b[2Jb\x9bc\u202ed") == "a\ufffd[2Jb\ufffdc\ufffdd"
    assert one_line("a\x1b\n b\tc") == "a\ufffd b c"


def test_control_characters_in_tables_and_panels_are_replaced() -> None:
    table = Table("head", EVIL)
    table.add_row(EVIL, Text(EVIL, style="red"))
    parts = Group(EVIL, Text.assemble("a", (EVIL, "bold")), table, Panel(EVIL, title=Text(EVIL), subtitle=Text(EVIL)))
    terminal = Terminal(file=StringIO(), force_terminal=True, color_system=None, width=300)
    with terminal.capture() as captured:
        terminal.print(parts)
    assert harmless(captured.get())
    assert captured.get().count(SHOWN) == 8


def harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Create objects with control characters wherever the API allows them."""
    with served(tmp_path_factory.mktemp("api"), fill, spoil) as kubeconfig:
        yield kubeconfig


def spoil(api: Api) -> None:
    path = "/apis/scheduling.koordinator.sh/v1alpha1/devices/n1"
    device = api.get(path)
    for row in device["spec"]["devices"]:
        row["labels"] = {"gpu.koordinator.sh/model": EVIL, "node.koordinator.sh/gpu-model": EVIL}
    api.replace(path, device)
    said = json.dumps({"version": EVIL, "cdi": True, "cards": 2, "wholeCards": "mgpu"})
    api.patch(
        "/api/v1/nodes/n1", {"metadata": {"annotations": {AGENT_ANNOTATION: said}, "labels": {"mgpu.io/gpu": "true"}}}
    )
    Installation(api).workload("deployments", "Deployment", "mgpu-scheduler", 1)
    node = api.get("/api/v1/nodes/n1")
    node["status"]["addresses"] = [{"type": "InternalIP", "address": EVIL}]
    api.replace("/api/v1/nodes/n1/status", node)
    condition = {"type": "PodScheduled", "status": "False", "reason": EVIL, "message": EVIL}
    waits = api.get(f"{PODS}/waits")
    api.replace(f"{PODS}/waits/status", {**waits, "status": {"phase": "Pending", "conditions": [condition]}})
    api.create(PODS, share("wishes", annotations={"mgpu.io/card-models": EVIL, "mgpu.io/spread-group": EVIL}))
    record = {"vke.volcengine.com/gpu-index-container-c": EVIL, "vke.volcengine.com/assumed": "true"}
    api.create(PODS, share("record", node="n1", annotations=record))
    odd = [{"type": kind, "status": "True", "reason": EVIL, "message": EVIL} for kind in ("Bound", "Degraded")]
    named = api.get(f"{MTGPUPODS}/notebook")
    status = {"phase": EVIL, "BoundDeviceID": "GPU-n2-1", "conditions": odd}
    api.replace(f"{MTGPUPODS}/notebook/status", {**named, "status": status})


@pytest.mark.parametrize("width", ["80", "2000"])
@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("inspect",), True),
        (("top",), False),
        (("doctor",), True),
        (("explain", "waits"), True),
        (("explain", "wishes"), True),
        (("explain", "record"), False),
        (("explain", "mtgpupod/notebook"), True),
        ((), True),
    ],
)
def test_commands_print_no_control_characters(
    kubeconfig: str, command: tuple[str, ...], shown: bool, form: str, width: str
) -> None:
    """Check the output of a command. shown: a text that looks like markup; in 80 columns a line may break anywhere."""
    arguments = [*command, "--kubeconfig", kubeconfig, "-o", form]
    result = CliRunner().invoke(plugin if command else inspect_gpushare, arguments, env={"COLUMNS": width})
    assert (result.exit_code in (0, 1), isinstance(result.exception, Exception)) == (True, False), result.output
    assert harmless(result.output), [letter for letter in result.output if not harmless(letter)]
    assert width == "80" or not [line for line in result.output.splitlines() if line.startswith("ok a further")]
    if form == "json":
        json.loads(result.stdout)
    elif shown and width == "2000":
        assert "[red]x[/nope]" in result.output


def test_api_errors_are_printed_without_control_characters(kubeconfig: str) -> None:
    result = CliRunner().invoke(plugin, ["explain", EVIL, "--kubeconfig", kubeconfig])
    assert result.exit_code != 0
    assert harmless(result.output)
    assert result.output.count("\n") == 1


class Long:
    """A renderable with many lines. seen: the output at its end."""

    seen = ""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(f"line {i}") for i in range(2_000))
        self.seen = self._capsys.readouterr().out
        yield Text("last")


def test_show_prints_while_it_renders(capsys: pytest.CaptureFixture[str]) -> None:
    long = Long(capsys)
    show(Group(long, "end"))
    assert long.seen.startswith("line 0\nline 1\n")
    assert (long.seen + capsys.readouterr().out).splitlines() == [*(f"line {i}" for i in range(2_000)), "last", "end"]


def test_yaml_can_be_read_by_the_libraries_of_python_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    """Go takes more texts for numbers than Python: `1e3`, `0o17`."""
    texts = ["1e3", "1.5", "0x1f", "0o17", "0b1", "1_000", "+1", ".5", "yes", "null", "~", "12", "a: b", "- a", "", "#"]
    value = {"texts": texts, "numbers": [1, -1, 1.5], "1e3": None, "truth": True, "none": [], "empty": {}}
    show_yaml(value)
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == value
    assert not [line for line in text.splitlines() if line in ("- 1e3", "- 0o17", "- 1_000", "1e3: null")]
    assert "numbers:\n- 1\n- -1\n- 1.5\n" in text


def test_yaml_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show_yaml({"a": EVIL, "é": "ü"})
    text = capsys.readouterr().out
    assert harmless(text)
    assert yaml.safe_load(text) == {"a": EVIL, "é": "ü"}
    show_yaml({"é": "ü\nß"})
    assert "é: 'ü" in capsys.readouterr().out


def test_plain_output_has_neither_styles_nor_line_breaks_nor_blanks_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "word " * 100
    show_plain(Group(Text(words, style="red"), Padding(Text("a", style="bold"), (0, 0, 0, 2)), Text(EVIL), ""))
    first, second, *evil = capsys.readouterr().out.splitlines()
    assert (first, second) == (words.strip(), "  a")
    assert harmless("\n".join(evil))


def test_cells_of_plain_tables_have_no_blanks_and_none_is_empty() -> None:
    lines = list(table_lines(["NAME", "MODEL", "HELD-BY"], [["n1", "GeForce RTX", "claim a/b"], ["long-name", "", ""]]))
    assert lines == [
        "NAME        MODEL         HELD-BY",
        "n1          GeForce_RTX   claim a/b",
        "long-name   -             -",
    ]
    assert list(table_lines(["A", "B"], [["\x1b[2J", "x\ny"]]))[1] == "\ufffd[2J   x y"
    assert (core_cell(625), core_cell(1000), core_cell(None)) == ("62.5%", "100%", "-")
    assert (memory_cell(1 << 30), memory_cell(0), memory_cell(None)) == ("1024Mi", "0Mi", "-")
