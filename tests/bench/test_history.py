from pathlib import Path

import pytest

from bench.history import Measured, Run, append, from_json, history_file, machine, new_run, read, to_json
from bench.rows import Options, Row

FILTER = Row(what="filter", value=3.5, unit="ms", reference=1.5, peer=70.0, remark="p99 8")
RATE = Row(what="bound", value=40, unit="pods/s", more_is_better=True)
SECTIONS = (Measured("filter", (FILTER, RATE), seconds=2.5), Measured("real", skipped="no kube-apiserver"))


def run(commit: str = "a" * 40) -> Run:
    return Run(commit, False, "2026-11-23T18:00:00+00:00", "2 × CPU", "3.11.7", False, SECTIONS)


def test_a_run_is_read_back_as_it_was_written() -> None:
    assert from_json(to_json(run())) == run()


def test_the_history_has_one_line_for_each_run_the_oldest_first(tmp_path: Path) -> None:
    file = tmp_path / "new" / "history.jsonl"
    append(file, run("a" * 40))
    append(file, run("b" * 40))
    assert read(file) == [run("a" * 40), run("b" * 40)]
    assert len(file.read_text().splitlines()) == 2


def test_the_environment_names_the_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MGPU_BENCH_HISTORY", str(tmp_path / "h"))
    assert history_file() == tmp_path / "h"


def test_a_new_run_names_the_machine_and_the_options() -> None:
    found = new_run(Options(quick=True), SECTIONS)
    assert (found.quick, found.machine, found.sections) == (True, machine(), SECTIONS)


def test_the_ratio_is_that_to_the_reference() -> None:
    assert FILTER.ratio == pytest.approx(3.5 / 1.5)
    assert FILTER.peer_ratio == pytest.approx(0.05)
    assert RATE.ratio is None
