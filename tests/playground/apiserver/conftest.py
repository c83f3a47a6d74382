"""A running API server and its kubeconfig: the playground's always, the real one where KUBEBUILDER_ASSETS has it."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from playground.realapi import real_api_server
from tests.playground.apiserver.api import Api
from tests.playground.apiserver.hooks import Hooks

TOKENS = {
    "admin-token": User("kubernetes-admin", ("system:masters",)),
    "other-token": User("system:serviceaccount:ns:other", ("system:serviceaccounts",)),
}
_numbers = itertools.count(1)


def _log(namespace: str, pod: str, container: str) -> str:
    if pod == "not-started":
        raise LookupError(container)
    return f"first\n{namespace}/{pod}/{container}\n"


def missing_assets() -> str:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder:
        return "KUBEBUILDER_ASSETS is not set: no real API server to compare with"
    missing = [name for name in ("etcd", "kube-apiserver") if not (Path(folder) / name).is_file()]
    return f"KUBEBUILDER_ASSETS lacks {', '.join(missing)}" if missing else ""


@pytest.fixture(scope="session", params=["playground", "real"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API server that a whole session shares; tests keep apart by namespace and by name."""
    real = request.param == "real"
    if real and (reason := missing_assets()):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if real:
            assets = Path(os.environ["KUBEBUILDER_ASSETS"])
            url, ca = stack.enter_context(real_api_server(assets, folder, TOKENS))
        else:
            tls = self_signed(folder)
            url, ca = stack.enter_context(running(ApiServer(tokens=TOKENS, log_source=_log), tls=tls)), Path(tls[0])
        kubeconfig = folder / "kubeconfig"
        write_kubeconfig(kubeconfig, url, ca.read_bytes(), "admin-token")
        found = Api(url, str(ca), "admin-token", kubeconfig, real=real)
        yield found
        found.close()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{next(_numbers)}"


@pytest.fixture
def ns(api: Api, name: str) -> str:
    """A namespace of the test's own."""
    api.ok("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def pods(ns: str) -> str:
    """The path of the pods of the test's namespace."""
    return f"/api/v1/namespaces/{ns}/pods"


@pytest.fixture
def hooks(api: Api, ns: str, tmp_path: Path) -> Iterator[Hooks]:
    """Admission webhooks of the test's own, called for its namespace alone."""
    with Hooks.served(api, ns, tmp_path) as found:
        yield found
