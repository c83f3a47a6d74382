"""Interrupted scripts leave no temporary folder, because some of these contain private keys."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import until

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SCRIPTS = sorted(file for file in Path("manifests").glob("*.sh") if "mktemp" in file.read_text())


def _with_default_signals() -> None:
    """Restore the default handlers: a shell cannot trap a signal that was ignored when it started, as under nohup."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
@pytest.mark.parametrize("ended_by", SIGNALS)
def test_an_interrupted_script_leaves_no_folder(tmp_path: Path, script: Path, ended_by: signal.Signals) -> None:
    tools, folders = tmp_path / "bin", tmp_path / "tmp"
    for folder in (tools, folders):
        folder.mkdir()
    for name in ("kubectl", "openssl"):  # where the script is when the signal comes
        (tools / name).write_text("#!/bin/sh\ntouch $TMPDIR/../asked\nexec sleep 3\n")
        (tools / name).chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(folders)}
    running = subprocess.Popen(
        ["sh", str(script)],
        env=environ,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        preexec_fn=_with_default_signals,
    )
    try:
        until((tmp_path / "asked").exists)
        assert list(folders.iterdir())
        os.killpg(running.pid, ended_by)
        assert running.wait(30) != 0
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert not list(folders.iterdir())
