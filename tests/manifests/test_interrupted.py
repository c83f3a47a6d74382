"""Scripts that are interrupted leave no folder behind: private keys are in some of them."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import until

SCRIPTS = sorted(file for file in Path("manifests").glob("*.sh") if "mktemp" in file.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_script_leaves_no_folder(tmp_path: Path, script: Path, ended_by: signal.Signals) -> None:
    tools, folders = tmp_path / "bin", tmp_path / "tmp"
    for folder in (tools, folders):
        folder.mkdir()
    for name in ("kubectl", "openssl"):  # where the script is when the signal comes
        (tools / name).write_text("#!/bin/sh\ntouch $TMPDIR/../asked\nexec sleep 3\n")
        (tools / name).chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(folders)}
    running = subprocess.Popen(["sh", str(script)], env=environ, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        until((tmp_path / "asked").exists)
        assert list(folders.iterdir())
        os.killpg(running.pid, ended_by)
        assert running.wait(30) != 0
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert not list(folders.iterdir())
