"""Child processes that are stopped, and ports that are never handed out twice (playground/processes.py)."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from playground.processes import BLOCK, Ports, Process, StartError
from tests.waiting import until


@pytest.fixture
def two() -> Iterator[tuple[Ports, Ports]]:
    """As two processes have them."""
    both = Ports(), Ports()
    yield both
    for ports in both:
        ports.close()


def test_free_port_is_never_returned_twice(two: tuple[Ports, Ports]) -> None:
    given = [ports.free() for _ in range(2 * BLOCK) for ports in two]
    assert len(set(given)) == len(given)


def test_free_port_skips_ports_in_use(two: tuple[Ports, Ports]) -> None:
    ports, _ = two
    following = ports.free() + 1
    with socket.create_server(("127.0.0.1", following)):
        assert ports.free() > following


def test_free_port_skips_a_block_that_is_in_use(monkeypatch: pytest.MonkeyPatch, two: tuple[Ports, Ports]) -> None:
    ports, _ = two
    probed: list[int] = []

    def is_free(port: int) -> bool:
        probed.append(port)
        return len(probed) > BLOCK

    monkeypatch.setattr("playground.processes._is_free", is_free)
    assert ports.free() == probed[-1]


def test_process_that_ends_raises_start_error_with_its_log(tmp_path: Path) -> None:
    code = "import sys; print('no card'); sys.exit(3)"
    process = Process("p", [sys.executable, "-c", code], tmp_path / "log", {})
    process.start()
    with pytest.raises(StartError, match="p: ready: the process ended\nno card"):
        process.wait("ready", lambda: False, 20)


def test_process_that_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.processes._STOP_SECONDS", 0.1)
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork();"
        "open(f'{os.getpid()}.pid', 'w').close(); time.sleep(60)"
    )
    process = Process(
        "p", [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"], tmp_path / "l", {}
    )
    process.start()
    process.wait("forked", lambda: len(list(tmp_path.glob("*.pid"))) == 2, 20)
    process.stop()
    assert not process.running
    until(lambda: not any(map(_alive, tmp_path.glob("*.pid"))))


def _alive(path: Path) -> bool:
    stat = Path(f"/proc/{path.stem}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
