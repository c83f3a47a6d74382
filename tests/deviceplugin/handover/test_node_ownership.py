"""The lock of a node."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deviceplugin.handover.node_ownership import NodeLock
from mgpu.model.errors import BadObject

HOLD = "import sys, time; from pathlib import Path; from deviceplugin.handover.node_ownership import NodeLock\n"
HOLD += "print(NodeLock(Path(sys.argv[1])).try_acquire(), flush=True); time.sleep(60)"


def test_held_lock_cannot_be_acquired(tmp_path: Path) -> None:
    first, second = NodeLock(tmp_path / "device-plugins"), NodeLock(tmp_path / "device-plugins")
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    assert not first.try_acquire()
    second.release()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        lock = NodeLock(tmp_path)
        assert not lock.try_acquire()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(60)
        assert lock.try_acquire()
        lock.release()


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadObject, match="Not a directory"):
        NodeLock(tmp_path / "file" / "device-plugins").try_acquire()
