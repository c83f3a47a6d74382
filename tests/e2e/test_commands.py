"""`mgpu playground` as a user starts it, and `mgpu demo` with its processes forked."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mgpu.cli.main import main
from playground import processes
from tests.waiting import until

MGPU = [sys.executable, "-m", "mgpu.cli.main"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the commands put their folder (short: it holds sockets); whatever is left there was left behind."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        yield Path(folder)


def environ(temporary: Path, columns: int = 80) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(temporary), "COLUMNS": str(columns), "NO_COLOR": "1"}


def left(temporary: Path) -> tuple[list[Path], list[str]]:
    """Files and processes that still know the folder."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        processes += [line] if str(temporary) in line else []
    return list(temporary.iterdir()), processes


@contextmanager
def killing(child: "subprocess.Popen[str]") -> Iterator[None]:
    """A test that fails does not wait for it."""
    try:
        yield
    except BaseException:
        child.kill()
        raise


def test_the_demo_runs_to_its_end_in_a_pipe_and_in_a_narrow_terminal(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, and its own processes are forked. `mgpu playground` is executed, and starts and ends alike."""
    columns, spawn = 60, processes.spawn
    started: list[processes.Child] = []

    def noted(*arguments: Any) -> processes.Child:
        started.append(spawn(*arguments))
        return started[-1]

    monkeypatch.setattr(processes, "spawn", noted)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    runner = CliRunner(env=environ(temporary, columns))
    done = runner.invoke(main, ["demo", "--nodes", "2"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "✗" not in done.stdout
    assert re.search(r"([1-9]) of \1 run with exactly the cards of\s+their own\s+record", done.stdout)
    assert "must be a multiple of 100" in " ".join(done.stdout.split())
    assert "5 nodes · 12 cards" in done.stdout
    together = r"gpushare \(default/gpushare\), koordinator \(default/koordinator\), mgpu \(default/share\)"
    claim = r"node-1, card 0 dra \(claim default/claim-gpu-\w+\), "
    assert re.search(claim + together, " ".join(done.stdout.split()))
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert len(started) >= 7
    assert all(child.poll() is not None for child in started)
    assert left(temporary) == ([], [])


def test_the_playground_serves_kubectl_and_leaves_nothing_behind(temporary: Path) -> None:
    with (
        subprocess.Popen(
            [*MGPU, "playground", "--nodes", "1", "--cards", "2"],
            env=environ(temporary, 200),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as child,
        killing(child),
    ):
        assert child.stdout
        lines = []
        for line in child.stdout:
            lines.append(line)
            if "Ctrl-C stops" in line:
                break
        told = re.search(r"export KUBECONFIG=(\S+)", "".join(lines))
        assert told, lines
        page = re.search(r"web page: (http://127\.0\.0\.1:\d+/)", "".join(lines))
        assert page, lines
        with urllib.request.urlopen(page[1], timeout=10) as reply:
            assert b"<title>mgpu" in reply.read()
        if found := shutil.which("kubectl"):
            asked = [found, "--kubeconfig", told[1], "get", "nodes", "-o", "name"]
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
            assert sorted(answer.stdout.split()) == ["node/mig-1", "node/mps-1", "node/mtgpu-1", "node/node-1"]
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
    until(lambda: left(temporary) == ([], []))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_playground_ended_while_its_processes_start_leaves_no_process_behind(
    temporary: Path, number: signal.Signals
) -> None:
    command = [*MGPU, "playground", "--nodes", "1"]
    with (
        subprocess.Popen(command, env=environ(temporary), stdout=subprocess.DEVNULL, text=True) as child,
        killing(child),
    ):
        until(lambda: any("deviceplugin" in line for line in left(temporary)[1]))
        child.send_signal(number)
        assert child.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    # Only the signal that cannot be caught leaves files.
    until(lambda: left(temporary)[1] == [] and (number == signal.SIGKILL or left(temporary)[0] == []))


def test_a_start_that_fails_shows_why(temporary: Path, tmp_path: Path) -> None:
    config = tmp_path / "mgpu.yaml"
    config.write_text("deviceplugin: {podResources: /nowhere, kubeletDir: 5}\n")
    done = subprocess.run(
        [*MGPU, "playground", "--config", str(config)],
        env=environ(temporary),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "deviceplugin.kubeletDir" in done.stderr
    assert left(temporary) == ([], [])
