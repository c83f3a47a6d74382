"""`mgpu inspect`, `top` and `explain` print the same from the scheduler and from lists of the API server."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from werkzeug.serving import make_server

from mgpu.cli import cluster_objects
from mgpu.cli.kubectl import plugin
from mgpu.cli.scheduler_source import SERVICE
from mgpu.kube import Api
from mgpu.presentation.answers import READER
from mgpu.serving.app import new_app
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from playground.installation import manifests
from scheduler.api.commands.commands_app import serve_commands
from scheduler.api.commands.live_overview import EVERY_SECONDS
from scheduler.listed_cluster import fill_cache
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.explained_cluster import add, fill
from tests.scheduler.fake import FakeApi, Replica

USERS = {"admin": User("admin", ("system:masters",)), "operator": User("operator"), "viewer": User("viewer")}
COMMANDS = [
    ("inspect",),
    ("inspect", "n1", "n3"),
    ("top", "--sort", "name"),
    *(("explain", name) for name in ("too-large", "two", "waits", "malformed", "plain", "holder", "late", "gated")),
    ("explain", "waits", "--node", "n2"),
    ("explain", "mtgpupod/notebook"),
]
ROLES = "/apis/rbac.authorization.k8s.io/v1"


@dataclass
class Installed:
    """A cluster whose scheduler the API server's proxy reaches."""

    folder: Path
    server: ApiServer
    replica: Replica
    api: Api
    clock: Clock

    def run(self, *arguments: str, user: str = "admin") -> Result:
        self.clock.now += EVERY_SECONDS  # Answers are shared for so long.
        kubeconfig = str(self.folder / f"{user}.kubeconfig")
        return CliRunner().invoke(plugin, [*arguments, "--kubeconfig", kubeconfig])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("api")
    tls = self_signed(folder)
    server = ApiServer(tokens=USERS, restricted=("operator", "viewer"))
    with running(server, tls=tls) as url:
        for user in USERS:
            write_kubeconfig(folder / f"{user}.kubeconfig", url, Path(tls[0]).read_bytes(), user)
        api = Api.connect(str(folder / "admin.kubeconfig"))
        fill(api)
        install_roles(api)
        replica = Replica(FakeApi())
        fill_cache(replica.state, cluster_objects.read_lists(api))
        replica.api = api  # type: ignore[assignment]
        clock = Clock()
        with serving(replica, clock) as address:
            server.services.urls["mgpu-system", SERVICE] = address
            yield Installed(folder, server, replica, api, clock)
        api.close()


def install_roles(api: Api) -> None:
    """Create the roles of `mgpu-inspect`, bind both to `operator`, and only the one for lists to `viewer`."""
    for manifest in manifests():
        if manifest["metadata"]["name"] == READER:
            of = {"ServiceAccount": "/api/v1/namespaces/mgpu-system/serviceaccounts"}
            of |= {"ClusterRole": f"{ROLES}/clusterroles", "Role": f"{ROLES}/namespaces/mgpu-system/roles"}
            api.create(of[manifest["kind"]], manifest)
    group = "rbac.authorization.k8s.io"
    for user, kind, path in (
        ("operator", "ClusterRole", "clusterrolebindings"),
        ("operator", "Role", "namespaces/mgpu-system/rolebindings"),
        ("viewer", "ClusterRole", "clusterrolebindings"),
    ):
        role = {"apiGroup": group, "kind": kind, "name": READER}
        subjects = [{"apiGroup": group, "kind": "User", "name": user}]
        made = {"metadata": {"name": f"{user}-{kind.lower()}"}, "roleRef": role, "subjects": subjects}
        api.create(f"{ROLES}/{path}", made)


class serving:  # noqa: N801 (used like a function)
    """Serves the endpoints of a replica over plain HTTP."""

    def __init__(self, replica: Any, clock: Clock) -> None:
        app = new_app()
        serve_commands(app, replica, clock)
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_both_sources_print_the_same(installed: Installed, command: tuple[str, ...], output: str) -> None:
    live = installed.run(*command, "-o", output, "--from", "scheduler")
    listed = installed.run(*command, "-o", output, "--from", "api")
    assert (live.exit_code, live.stdout) == (0, listed.stdout)
    assert (live.stderr, listed.stderr) == ("", "")


@pytest.mark.parametrize(
    "command", [("inspect", "n1", "n9"), ("explain", "none"), ("explain", "waits", "--node", "n9")]
)
def test_both_sources_report_the_same_errors(installed: Installed, command: tuple[str, ...]) -> None:
    live = installed.run(*command)
    listed = installed.run(*command, "--from", "api")
    assert (live.exit_code, live.stderr) == (listed.exit_code, listed.stderr) == (1, listed.stderr)


def test_a_user_with_both_roles_asks_the_scheduler(installed: Installed) -> None:
    for command in (("inspect",), ("top",), ("explain", "waits")):
        found = installed.run(*command, "--from", "scheduler", user="operator")
        assert (found.exit_code, found.stderr) == (0, "")


def test_a_user_who_may_not_ask_the_scheduler_gets_the_answer_of_the_api_server(installed: Installed) -> None:
    refused = installed.run("top", "--from", "scheduler", user="viewer")
    assert (refused.exit_code, "serviceaccounts/token" in refused.stderr) == (1, True)
    assert installed.run("top", user="viewer").stdout == installed.run("top").stdout


def test_a_reservation_is_shown_only_by_the_scheduler(installed: Installed) -> None:
    gpu_pod = next(g for g in installed.replica.state.gpu_pods() if g.pod.name == "unseen")
    reserved = installed.replica.decider.decide(gpu_pod, "n2")
    try:
        live, listed = (found(installed, "inspect", "--from", one) for one in ("scheduler", "api"))
    finally:
        installed.replica.state.reservations.cancel(reserved)  # type: ignore[arg-type]
    holders = [[h for card in answer["nodes"]["n2"]["cards"] for h in card["holders"]] for answer in (live, listed)]
    assert ("default/unseen/c" in holders[0], "default/unseen/c" in holders[1]) == (True, False)


def found(installed: Installed, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(installed.run(*arguments, "-o", "json").stdout))


def test_a_replica_that_does_not_lead_is_named(installed: Installed) -> None:
    installed.replica.leading = False
    try:
        result = installed.run("top", "--from", "scheduler")
    finally:
        installed.replica.leading = True
    assert (result.exit_code, "does not know reservations" in result.stderr) == (0, True)


def test_a_scheduler_of_another_version_is_not_believed(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu.cli.scheduler_source.own_version", lambda: "9.9")
    refused = installed.run("top", "--from", "scheduler")
    assert (refused.exit_code, "and this command 9.9" in refused.stderr) == (1, True)
    assert installed.run("top").exit_code == 0


def test_a_scheduler_that_cannot_be_reached_is_replaced_by_the_api_server(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installed.server.services.urls, ("mgpu-system", SERVICE), "http://127.0.0.1:9")
    refused = installed.run("inspect", "--from", "scheduler")
    assert (refused.exit_code, "the scheduler does not answer" in refused.stderr) == (1, True)
    assert installed.run("inspect").exit_code == 0


def test_settings_of_the_user_need_the_api_server(installed: Installed, tmp_path: Path) -> None:
    file = tmp_path / "mgpu.yaml"
    file.write_text("")
    assert installed.run("top", "--config", str(file)).exit_code == 0
    assert installed.run("top", "--config", str(file), "--from", "scheduler").exit_code == 2


def test_a_pod_that_the_scheduler_has_not_seen_is_explained_from_lists(installed: Installed) -> None:
    add(installed.api, b.share("new", 50, 1024))
    try:
        assert "so it does not wait for cards" in installed.run("explain", "new").stdout
    finally:
        installed.api.delete("/api/v1/namespaces/default/pods/new")
