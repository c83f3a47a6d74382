"""The command `mgpu deviceplugin`: help, invalid input, and a run from start to SIGTERM."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from deviceplugin.handover.node_ownership import NodeLock
from mgpu.cli.main import main

MGPU = [sys.executable, "-m", "mgpu.cli.main", "deviceplugin"]
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
"""


def test_help_has_examples() -> None:
    result = CliRunner().invoke(main, ["deviceplugin", "--help"])
    assert result.exit_code == 0
    assert "mgpu deviceplugin --node n1 --cards cards.yaml" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["--cards", "twice.yaml"], "twice.yaml: two cards have the UUID a"),
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
        (["--config", "unknown.yaml"], "unknown.yaml: deviceplugin.colour: unknown; allowed: node, cards, kubeletDir"),
        (["--health-port", "70000"], "deviceplugin.healthPort: Input should be less than or equal to 65535"),
        (["--cards", "cards.yaml", "--kubeconfig", "none.yaml"], "none.yaml: Invalid kube-config file"),
        (["--kubelet-dir", "/" + "x" * 100], "is too long for a unix socket"),
        (["--config", "open.yaml"], "deviceplugin.mpsControl: must be a command, not 'a \"b'"),
        (["--config", "off.yaml"], "dialects: none is enabled: there is no resource to serve"),
        (["--whole-cards", "dra"], "deviceplugin.wholeCards: must not be dra unless dra.enabled is true"),
        (["--config", "dra.yaml", "--no-cdi"], "dra.enabled: needs a container runtime with CDI"),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cards.yaml").write_text("[{memory: 80Gi}]")
    (tmp_path / "twice.yaml").write_text("[{memory: 80Gi, uuid: a}, {memory: 80Gi, uuid: a}]")
    (tmp_path / "open.yaml").write_text("deviceplugin: {mpsControl: 'a \"b'}")
    (tmp_path / "unknown.yaml").write_text("deviceplugin: {colour: red}")
    off = ", ".join(f"{name}: {{enabled: false}}" for name in ("mgpu", "gpushare", "koordinator", "slices"))
    (tmp_path / "off.yaml").write_text(f"dialects: {{{off}}}")
    (tmp_path / "dra.yaml").write_text("dra: {enabled: true}")
    result = CliRunner().invoke(main, ["deviceplugin", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_kubelet_dir_is_refused_if_the_second_socket_name_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that take over from one another alternate between two names for each resource."""
    monkeypatch.chdir(tmp_path)
    Path("cards.yaml").write_text("[{memory: 80Gi}]")
    first = "/device-plugins/mgpu-gpu-memory-ratio.sock"
    folder = "/" + "x" * (107 - len(first) - 1)
    arguments = ["--cards", "cards.yaml", "--kubelet-dir", folder, "--pod-resources", "/p", "--kubeconfig", "none.yaml"]
    result = CliRunner().invoke(main, ["deviceplugin", *arguments])
    assert "mgpu-gpu-memory-ratio.2.sock is too long for a unix socket (107 bytes at most)" in result.output


@contextmanager
def agent_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command without a kubelet or an API server."""
    (folder / "kubeconfig").write_text(KUBECONFIG)
    (folder / "cards.yaml").write_text("[{memory: 80Gi}]")
    environment = {**os.environ, "MGPU_DEVICEPLUGIN__KUBELETDIR": str(folder), "NODE_NAME": "n7"}
    command = [*MGPU, "--cards", str(folder / "cards.yaml"), "--kubeconfig", str(folder / "kubeconfig")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield process
    finally:
        process.kill()


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    return lines


def end(process: subprocess.Popen[str]) -> str:
    """End the process by SIGTERM, and return the rest of its log."""
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    return rest


def test_agent_waits_for_kubelet_and_api_server_and_stops_on_sigterm(folder: Path) -> None:
    with agent_process(folder) as process:
        lines = lines_until(process, "waiting for the kubelet")
        assert any('"started"' in line and '"n7"' in line for line in lines)
        assert '"stopped"' in end(process)


def test_second_agent_stands_by_and_stops_on_sigterm(folder: Path) -> None:
    lock = NodeLock(folder / "device-plugins")
    assert lock.try_acquire()
    try:
        with agent_process(folder) as process:
            lines_until(process, '"standing by"')
            assert '"started"' not in end(process)
    finally:
        lock.release()
