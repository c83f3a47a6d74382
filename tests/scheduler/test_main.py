"""The command reports invalid input in one line."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mgpu.cli.main import main

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command leaves pytest's log alone."""
    monkeypatch.setattr("scheduler.main.logs.set_up_logging", lambda _: None)


def run(*options: str) -> Result:
    return CliRunner().invoke(main, ["scheduler", *options])


@pytest.fixture
def kubeconfig(tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return str(path)


def test_help_has_examples() -> None:
    said = run("--help")
    assert said.exit_code == 0
    assert "mgpu scheduler --kubeconfig" in said.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("scheduler: {ports: 1}", "scheduler.ports: unknown; allowed: "),
        ("scheduler: {port: 99999}", "scheduler.port: "),
        ("nodePolicy: best", "nodePolicy: "),
        ("{", "is not YAML"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(tmp_path: Path, settings: str, message: str) -> None:
    path = tmp_path / "mgpu.yaml"
    path.write_text(settings)
    said = run("--config", str(path))
    assert said.exit_code == 2
    assert message in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [("--config", "/does/not/exist"), ("--kubeconfig", "/does/not/exist")])
def test_unreadable_files_are_an_error(options: tuple[str, str]) -> None:
    said = run(*options)
    assert said.exit_code == 2
    assert "/does/not/exist" in said.stderr
    assert said.stderr.count("\n") == 1


def test_certificate_directory_without_files_is_an_error(kubeconfig: str, tmp_path: Path) -> None:
    said = run("--kubeconfig", kubeconfig, "--cert-dir", str(tmp_path))
    assert said.exit_code == 2
    assert "tls.crt" in said.stderr


@pytest.mark.parametrize("option", ["--port", "--extender-port"])
def test_taken_port_is_an_error(kubeconfig: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        others = {"--port": "0", "--extender-port": "0", option: port}
        said = run(
            "--kubeconfig", kubeconfig, "--host", "127.0.0.1", *(part for pair in others.items() for part in pair)
        )
    assert said.exit_code == 2
    assert port in said.stderr
    assert said.stderr.count("\n") == 1
