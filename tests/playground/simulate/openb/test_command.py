"""`mgpu simulate openb` from the command line in, beside `mgpu simulate FILE…`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mgpu.cli.main import main
from playground.simulate.openb import experiment
from playground.simulate.openb.experiment_policies import POLICIES
from tests.playground.simulate.openb.traces import NODES, PODS, written

SVG, PNG = b"<svg", b"\x89PNG"


def openb(files: tuple[Path, Path], *options: str) -> Result:
    nodes, pods = map(str, files)
    return CliRunner().invoke(main, ["simulate", "openb", "--nodes", nodes, "--pods", pods, *options])


def found(files: tuple[Path, Path], *options: str) -> Any:
    result = openb(files, *options, "-o", "json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_output_of_one_run_is_the_documented_object(files: tuple[Path, Path]) -> None:
    one = found(files, "--policy", "bestfit", "--seed", "5")
    assert list(one) == ["policy", "seed", "load", "placements_per_second"]
    assert (one["policy"], one["seed"]) == ("bestfit", 5)
    assert list(one["load"]) == ["90", "95", "100", "110", "120", "130"]
    assert all(percent is None or 50 < percent <= 100 for percent in one["load"].values())
    assert one["placements_per_second"] > 0


def test_output_is_null_for_loads_not_reached(files: tuple[Path, Path]) -> None:
    assert set(found(files, "--policy", "fgd", "--load", "0.5")["load"].values()) == {None}


def test_output_of_several_runs_is_a_list_in_order(files: tuple[Path, Path]) -> None:
    several = found(files, "--policy", "spread", "--policy", "fgd", "--seed", "3", "--seeds", "2")
    assert [(one["policy"], one["seed"]) for one in several] == [("spread", 3), ("spread", 4), ("fgd", 3), ("fgd", 4)]
    assert several[3]["load"] == found(files, "--policy", "fgd", "--seed", "4")["load"]


def test_table_has_a_row_for_each_policy(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes would import everything again.
    monkeypatch.setattr(experiment, "ProcessPoolExecutor", lambda workers, _: ThreadPoolExecutor(workers))
    shown = openb(files, "--policy", "fgd", "--policy", "random")
    assert shown.exit_code == 0
    assert "seed 42" in " ".join(shown.stdout.split())
    assert [name for name in POLICIES if f" {name} " in shown.stdout] == ["random", "fgd"]


@pytest.mark.parametrize(("name", "begins"), [("load.svg", SVG), ("load.png", PNG)])
def test_plot_writes_png_and_svg(files: tuple[Path, Path], tmp_path: Path, name: str, begins: bytes) -> None:
    result = openb(files, "--policy", "bestfit", "--plot", str(tmp_path / name))
    assert result.exit_code == 0, result.output
    assert begins in (tmp_path / name).read_bytes()[:1000]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plot", "load.txt"), "must end in .png or .svg"),
        (("--plot", "none/load.png"), "none is not a directory"),
        (("--load", "nan"), "nan is not a number above 0"),
        (("--load", "-1"), "-1.0 is not a number above 0"),
        (("--seeds", "0"), "0 is not in the range"),
        (("--policy", "best"), "'best' is not one of"),
    ],
)
def test_invalid_option_exits_with_2(files: tuple[Path, Path], options: tuple[str, str], said: str) -> None:
    result = openb(files, "--policy", "fgd", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_plot_without_matplotlib_exits_with_2(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = openb(files, "--policy", "fgd", "--plot", "load.png")
    assert result.exit_code == 2
    assert result.stderr == "--plot: needs matplotlib, which is not installed: pip install 'mgpu[plot]'\n"


def test_malformed_trace_is_one_line(tmp_path: Path) -> None:
    result = openb(written(tmp_path, NODES, PODS.replace(",700", ",7000")), "--policy", "fgd")
    assert result.exit_code == 2
    assert result.stderr == (
        f"{tmp_path}/pods.csv: line 3: gpu_milli: must be a whole number from 1 to 1000, not '7000'\n"
    )


def test_help_describes_files_and_openb() -> None:
    shown = CliRunner().invoke(main, ["simulate", "--help"]).output
    assert "simulate [OPTIONS] FILE..." in shown
    assert "openb" in shown
    assert "simulate openb [OPTIONS]" in CliRunner().invoke(main, ["simulate", "openb", "--help"]).output


def test_file_named_openb_is_read_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("openb").write_text("kind: Node\nmetadata: {name: n1}\n")
    result = CliRunner().invoke(main, ["simulate", "./openb", "-o", "json"])
    assert list(json.loads(result.stdout)["nodes"]) == ["n1"]
