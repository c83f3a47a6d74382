"""Fixtures: an empty API server (the playground's, or a real one from KUBEBUILDER_ASSETS) and kubectl."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mgpu.kube import Api
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from playground.realapi import real_api_server

ADMIN = {"admin-token": User("kubernetes-admin", ("system:masters",))}
Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a command with the cluster's KUBECONFIG; `given` is its standard input, `env` is added to its environment."""


@pytest.fixture(scope="module", params=["playground", "real"])
def kubeconfig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    with ExitStack() as stack:
        if request.param == "real":
            if not (Path(assets) / "kube-apiserver").is_file():
                pytest.skip("KUBEBUILDER_ASSETS names no directory with a kube-apiserver")
            url, ca = stack.enter_context(real_api_server(Path(assets), folder, ADMIN))
        else:
            tls = self_signed(folder)
            url, ca = stack.enter_context(running(ApiServer(tokens=ADMIN), tls=tls)), Path(tls[0])
        write_kubeconfig(folder / "kubeconfig", str(url), ca.read_bytes(), "admin-token")
        yield folder / "kubeconfig"


@pytest.fixture(scope="module")
def api(kubeconfig: Path) -> Iterator[Api]:
    made = Api.connect(str(kubeconfig))
    yield made
    made.close()


@pytest.fixture
def run(kubeconfig: Path, tmp_path: Path) -> Run:
    return runner(kubeconfig, tmp_path)


def runner(kubeconfig: Path, home: Path) -> Run:
    """Return a function that runs commands. Skips the test if kubectl is not installed."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")

    def made(
        *command: object, given: str = "", env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(word) for word in command],
            # GOGC: a process that lives for 50 ms spends a quarter of them on collecting garbage.
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(home), "GOGC": "off", **(env or {})},
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return made
