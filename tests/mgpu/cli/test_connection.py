"""The namespace of a command that is run without `--namespace`."""

from pathlib import Path

import pytest

from mgpu.cli import connection
from mgpu.cli.connection import current_namespace


@pytest.fixture(autouse=True)
def in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no kubeconfig, and the service account is that of the namespace `team`."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    (tmp_path / "namespace").write_text("team\n")
    monkeypatch.setattr(connection, "_POD_NAMESPACE", str(tmp_path / "namespace"))


def test_namespace_in_a_pod_is_that_of_its_service_account() -> None:
    assert current_namespace("", "") == "team"


def test_namespace_in_a_pod_that_sets_its_variable_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "other")
    assert current_namespace("", "") == "other"


def test_namespace_without_any_configuration_is_default(tmp_path: Path) -> None:
    (tmp_path / "namespace").unlink()
    assert current_namespace("", "") == "default"
