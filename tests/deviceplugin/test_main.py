"""The command: help, wrong input, and a run from start to SIGTERM."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from deviceplugin import health
from deviceplugin.handover.node_ownership import NodeLock
from deviceplugin.health import HealthServer
from mgpu.cli.main import main
from tests.mgpu.serving.flooding import flooded
from tests.waiting import until

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
    ("arguments", "said"),
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
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cards.yaml").write_text("[{memory: 80Gi}]")
    (tmp_path / "twice.yaml").write_text("[{memory: 80Gi, uuid: a}, {memory: 80Gi, uuid: a}]")
    (tmp_path / "open.yaml").write_text("deviceplugin: {mpsControl: 'a \"b'}")
    (tmp_path / "unknown.yaml").write_text("deviceplugin: {colour: red}")
    off = ", ".join(f"{name}: {{enabled: false}}" for name in ("mgpu", "gpushare", "koordinator", "slices"))
    (tmp_path / "off.yaml").write_text(f"dialects: {{{off}}}")
    result = CliRunner().invoke(main, ["deviceplugin", *arguments])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_paths_socket_of_an_agent_that_takes_over_is_too_long_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resource has two names in turn. With the shorter one alone, each second agent could not serve."""
    monkeypatch.chdir(tmp_path)
    Path("cards.yaml").write_text("[{memory: 80Gi}]")
    first = "/device-plugins/mgpu-gpu-memory-ratio.sock"
    folder = "/" + "x" * (107 - len(first) - 1)
    arguments = ["--cards", "cards.yaml", "--kubelet-dir", folder, "--pod-resources", "/p", "--kubeconfig", "none.yaml"]
    result = CliRunner().invoke(main, ["deviceplugin", *arguments])
    assert "mgpu-gpu-memory-ratio.2.sock is too long for a unix socket (107 bytes at most)" in result.output


def test_it_runs_without_kubelet_driver_and_api_server_says_so_and_stops_when_told(folder: Path) -> None:
    (folder / "kubeconfig").write_text(KUBECONFIG)
    (folder / "cards.yaml").write_text("[{memory: 80Gi}]")
    environment = {**os.environ, "MGPU_DEVICEPLUGIN__KUBELETDIR": str(folder), "NODE_NAME": "n7"}
    process = subprocess.Popen(
        [*MGPU, "--cards", str(folder / "cards.yaml"), "--kubeconfig", str(folder / "kubeconfig")],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    until(lambda: lines.append(process.stderr.readline()) or "waiting for the kubelet" in lines[-1])  # type: ignore[func-returns-value,union-attr]
    assert any('"started"' in line and '"n7"' in line for line in lines)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert '"stopped"' in rest


def test_second_agent_stands_by_and_ends_when_told(folder: Path) -> None:
    (folder / "kubeconfig").write_text(KUBECONFIG)
    (folder / "cards.yaml").write_text("[{memory: 80Gi}]")
    flags = ["--cards", str(folder / "cards.yaml"), "--kubeconfig", str(folder / "kubeconfig")]
    lock = NodeLock(folder / "device-plugins")
    assert lock.try_acquire()
    process = subprocess.Popen(
        [*MGPU, *flags, "--kubelet-dir", str(folder)], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stderr is not None
        until(lambda: '"standing by"' in str(process.stderr.readline()))  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        lock.release()
    assert process.returncode == 0
    assert '"started"' not in rest


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_who_connects_and_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_SECONDS", 0.05)
    server = HealthServer(0, str, str, host="127.0.0.1")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
            assert silent.recv(1) == b""
    finally:
        server.stop()


def test_who_says_a_little_now_and_then_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_SECONDS", 0.2)
    server = HealthServer(0, str, str, host="127.0.0.1")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.settimeout(0.02)
            until(lambda: hung_up(slow))
    finally:
        server.stop()


def hung_up(connection: socket.socket) -> bool:
    """After one more byte."""
    try:
        connection.send(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_unfinished_requests_do_not_fill_the_agent_with_threads_or_delay_a_probe() -> None:
    server = HealthServer(0, str, str, host="127.0.0.1")
    server.start()
    try:
        before = threading.active_count()
        with flooded(server.port, b"GET /healthz HTTP/1.1\r\nHost: "):
            for _ in range(5):
                began = time.monotonic()
                assert fetch(server.port, "/healthz") == (200, "ok\n")
                assert time.monotonic() - began < health.PATIENCE_SECONDS / 2
            # Beside the room's: the flood's own thread, and those that have lost their place and are about to end.
            assert threading.active_count() - before < health.MOST_CONNECTIONS + 100
    finally:
        server.stop()


def test_probes_are_answered_under_both_families() -> None:
    """A cluster may have IPv6 alone."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = HealthServer(0, str, str)
    server.start()
    try:
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, server.port), timeout=30):
                pass
    finally:
        server.stop()


def test_probes_tell_the_truth() -> None:
    problems = ["no cards"]
    server = HealthServer(0, lambda: "", lambda: "".join(problems), host="127.0.0.1")
    server.start()
    assert fetch(server.port, "/healthz") == (200, "ok\n")
    assert fetch(server.port, "/readyz") == (503, "no cards\n")
    problems.clear()
    assert fetch(server.port, "/readyz?verbose") == (200, "ok\n")
    assert fetch(server.port, "/") == (404, "not found\n")
    server.stop()
