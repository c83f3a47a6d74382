"""One agent per node."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deviceplugin.alone import alone
from mgpu.model.errors import BadObject

HOLD = "import sys, time; from pathlib import Path; from deviceplugin.alone import alone\n"
HOLD += "with alone(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_the_second_one_is_told_and_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "device-plugins"
    with alone(folder):
        (folder / "kubelet.sock").touch()
        with pytest.raises(BadObject, match="another node agent runs on this node already"), alone(folder):
            pass
    with alone(folder):
        pass


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BadObject), alone(tmp_path):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(60)
        with alone(tmp_path):
            pass


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadObject, match="Not a directory"), alone(tmp_path / "file" / "device-plugins"):
        pass
