"""The stand-in for nvidia-cuda-mps-control, used as the real one is: by its name, input and output."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from playground import mps_control
from tests.waiting import until

COMMAND = [sys.executable, "-S", "-E", mps_control.__file__]


@pytest.fixture
def pipes() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as path:
        yield Path(path)


def control(pipes: Path, *flags: str, line: str = "") -> tuple[int, str]:
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    done = subprocess.run([*COMMAND, *flags], env=env, input=line, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def test_daemon_answers_until_quit(pipes: Path) -> None:
    assert control(pipes, line="get_default_active_thread_percentage\n") == (
        1,
        "Cannot find MPS control daemon process",
    )
    assert control(pipes, "-d") == (0, "")
    assert control(pipes, line="get_default_active_thread_percentage\nget_server_list\n") == (0, "100.0")
    assert control(pipes, line="dance\n") == (0, "Unknown command 'dance'")
    assert control(pipes, line="quit\n") == (0, "")
    until(lambda: control(pipes, line="get_server_list\n")[0] == 1)


def test_second_daemon_in_a_pipe_directory_is_refused(pipes: Path) -> None:
    with subprocess.Popen([*COMMAND, "-f"], env={"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}) as first:
        until(lambda: control(pipes, line="get_server_list\n")[0] == 0)
        assert control(pipes, "-f") == (1, "An instance of this daemon is already running")
        assert control(pipes, "-d")[0] == 1
        first.kill()
    # What a killed one leaves is not in the way.
    assert control(pipes, "-d")[0] == 0
    assert control(pipes, line="quit\n")[0] == 0


def test_daemon_ends_when_its_directory_is_removed(pipes: Path) -> None:
    with subprocess.Popen([*COMMAND, "-f"], env={"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}) as daemon:
        until(lambda: control(pipes, line="get_server_list\n")[0] == 0)
        for file in pipes.iterdir():
            file.unlink()
        assert daemon.wait(20) == 0


def test_unknown_flag_is_an_error(pipes: Path) -> None:
    assert control(pipes, "-x") == (1, "usage: nvidia-cuda-mps-control [-d | -f]")
