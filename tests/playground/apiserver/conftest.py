"""The API servers under test: the playground's, and a real kube-apiserver where KUBEBUILDER_ASSETS has one.

Every contract test runs on both, so that the playground's server stays faithful.
"""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from playground.apiserver import ApiServer, Request, User, running, self_signed, write_kubeconfig
from playground.realapi import real_api_server, requests_in
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


def _missing_assets() -> str | None:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder:
        return "KUBEBUILDER_ASSETS is not set: no real API server to compare with"
    missing = [name for name in ("etcd", "kube-apiserver") if not (Path(folder) / name).is_file()]
    return f"KUBEBUILDER_ASSETS lacks {', '.join(missing)}" if missing else None


@contextmanager
def served(
    folder: Path, tokens: Mapping[str, User], restricted: Collection[str] = (), *, real: bool
) -> Iterator[tuple[str, Path, Callable[[], frozenset[Request]]]]:
    """Serve for the length of the context, which is given URL, CA file and the requests of the restricted users."""
    if real:
        if reason := _missing_assets():
            pytest.skip(reason)
        assets = Path(os.environ["KUBEBUILDER_ASSETS"])
        with real_api_server(assets, folder, tokens, restricted) as (url, ca):
            yield url, ca, lambda: requests_in(folder)
        return
    tls = self_signed(folder)
    server = ApiServer(tokens=tokens, restricted=restricted, log_source=_log)
    with running(server, tls=tls) as url:
        yield url, Path(tls[0]), lambda: server.requests


@pytest.fixture(scope="session", params=["playground", "real"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API server for the whole session; tests use different namespaces and names."""
    real = request.param == "real"
    folder = tmp_path_factory.mktemp(request.param)
    with served(folder, TOKENS, real=real) as (url, ca, _):
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
    """A new namespace."""
    api.ok("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def pods(ns: str) -> str:
    """The path of the pods in the test's namespace."""
    return f"/api/v1/namespaces/{ns}/pods"


@pytest.fixture
def hooks(api: Api, ns: str, tmp_path: Path) -> Iterator[Hooks]:
    """Admission webhooks that are called for the test's namespace only."""
    with Hooks.served(api, ns, tmp_path) as found:
        yield found
