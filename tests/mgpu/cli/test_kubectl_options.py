"""The options of `kubectl mgpu` do what they do in kubectl: formats, namespaces, users, timeouts, errors."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from mgpu.cli import kubectl
from mgpu.cli.connection import Connection
from mgpu.cli.kubectl import plugin
from mgpu.cli.kubectl_options import Duration
from mgpu.kube import Api
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from tests.agent_pods import agent
from tests.builders import share
from tests.mgpu.cli.served import ON_A_TERMINAL, served
from tests.scheduler.explained_cluster import RECORD, fill

BEYOND_TEXT = re.compile(r"[\x1b\u2500-\u259f]")
"""Control sequences, box drawing and block elements."""
READS = (["inspect"], ["top"], ["explain", "too-large"], ["doctor"])


def fill_namespaces(api: Api) -> None:
    fill(api)
    api.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    for name, placed in (("own", {"node": "n2", "annotations": RECORD}), ("later", {})):
        raw = share(name, 20, 1024, **placed)
        raw["metadata"]["namespace"] = "team"
        api.create("/api/v1/namespaces/team/pods", raw)


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("api"), fill_namespaces) as kubeconfig:
        yield kubeconfig


def run(kubeconfig: str, *arguments: str, terminal: bool = False) -> Result:
    runner = CliRunner(env=ON_A_TERMINAL if terminal else {})
    return runner.invoke(plugin, [*arguments, "--kubeconfig", kubeconfig])


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.partition("\n\n")[0].splitlines()]


@pytest.mark.parametrize("command", READS, ids=lambda command: command[0])
def test_yaml_has_the_same_data_as_json(kubeconfig: str, command: list[str]) -> None:
    as_json = run(kubeconfig, *command, "-o", "json")
    as_yaml = run(kubeconfig, *command, "-o", "yaml")
    assert as_yaml.exit_code == as_json.exit_code
    assert yaml.safe_load(as_yaml.stdout) == json.loads(as_json.stdout)
    assert not as_yaml.stdout.startswith("{")


@pytest.mark.parametrize("command", [*READS, ["top", "pod"], ["inspect", "-o", "wide"]], ids=" ".join)
def test_a_pipe_gets_plain_lines_of_any_length(kubeconfig: str, command: list[str]) -> None:
    text = run(kubeconfig, *command).stdout
    assert not BEYOND_TEXT.search(text)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_explanation_in_a_pipe_is_not_broken_into_lines(kubeconfig: str) -> None:
    text = run(kubeconfig, "explain", "too-large").stdout
    (reason,) = [line for line in text.splitlines() if line.startswith("n1: ")]
    assert reason.endswith("(evicting pods cannot help)")


def test_inspect_in_a_pipe_has_a_line_for_each_card(kubeconfig: str) -> None:
    names, *cards = rows(run(kubeconfig, "inspect").stdout)
    assert names == [
        "NODE",
        "CARD",
        "MODEL",
        "STATUS",
        "HELD-CORE",
        "FREE-CORE",
        "HELD-MEMORY",
        "FREE-MEMORY",
        "HELD-BY",
    ]
    assert cards[1] == ["n1", "1", "A100-SXM4-80GB", "Healthy", "60%", "40%", "61440Mi", "20480Mi", "default/holder"]
    assert [row[:2] for row in cards] == [["n1", "0"], ["n1", "1"], ["n2", "0"], ["n2", "1"]]


def test_wide_has_more_columns_also_on_a_terminal(kubeconfig: str) -> None:
    wide = run(kubeconfig, "inspect", "-o", "wide").stdout
    assert rows(wide)[0][8:] == ["UUID", "GPUID", "SLICES", "ISOLATION", "REQUESTED-AS", "HELD-BY"]
    assert rows(wide)[2][8:] == ["GPU-n1-1", "-", "-", "-", "mgpu", "default/holder"]
    assert run(kubeconfig, "inspect", "-o", "wide", terminal=True).stdout == wide
    assert rows(run(kubeconfig, "top", "node", "-o", "wide").stdout)[0][8:] == ["HELD-CORE%", "HELD-MEMORY%", "MODELS"]
    assert "GPU-n1-1" in run(kubeconfig, "explain", "too-large", "-o", "wide").stdout
    assert "GPU-n1-1" not in run(kubeconfig, "explain", "too-large").stdout


def test_names_are_those_of_objects_and_are_accepted_as_arguments(kubeconfig: str) -> None:
    assert run(kubeconfig, "inspect", "-o", "name").stdout.split() == ["node/n1", "node/n2", "node/n3"]
    assert run(kubeconfig, "inspect", "node/n2", "-o", "name").stdout == "node/n2\n"
    assert run(kubeconfig, "top", "-o", "name", "--sort-by", "name").stdout.split() == ["node/n1", "node/n2"]
    assert run(kubeconfig, "top", "pod", "-o", "name", "-n", "team").stdout == "pod/own\n"


def test_top_shows_one_table_alone(kubeconfig: str) -> None:
    assert rows(run(kubeconfig, "top", "pods", "-n", "team").stdout) == [
        ["NAMESPACE", "NAME", "CARDS", "HELD-CORE", "HELD-MEMORY", "NODE", "REQUESTED-AS"],
        ["team", "own", "1", "20%", "1024Mi", "n2", "mgpu"],
    ]
    assert rows(run(kubeconfig, "top", "node").stdout)[0][0] == "NODE"
    assert run(kubeconfig, "top", "node", terminal=True).stdout.split()[0] == "node"
    assert run(kubeconfig, "top", "card").exit_code == 2


def test_namespace_leaves_its_nodes_and_its_waiting_pods(kubeconfig: str) -> None:
    answer: Any = json.loads(run(kubeconfig, "inspect", "-n", "team", "-o", "json").stdout)
    assert list(answer["nodes"]) == ["n2"]
    assert answer["pending"] == ["team/later"]
    assert (answer["gated"], answer["mtgpupods"]) == ({}, {})
    assert not [what for what in answer["unclear"] if "default/" in what]
    top: Any = json.loads(run(kubeconfig, "top", "-n", "team", "-o", "json").stdout)
    assert ([row["pod"] for row in top["holders"]], top["pending"], top["gated"]) == (["team/own"], 1, 0)
    assert [row["name"] for row in top["nodes"]] == ["n1", "n2"]


def test_all_namespaces_is_the_default_and_overrides_a_namespace(kubeconfig: str) -> None:
    for command in ("inspect", "top"):
        everything = run(kubeconfig, command, "-o", "json").stdout
        assert run(kubeconfig, command, "-o", "json", "-A", "-n", "team").stdout == everything


def test_namespace_without_cards_has_no_rows(kubeconfig: str) -> None:
    result = run(kubeconfig, "inspect", "-n", "none")
    text = "No pod of namespace none holds a card.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", text)
    assert text in run(kubeconfig, "inspect", "-n", "none", terminal=True).stdout


def test_explain_takes_a_type_and_a_name_as_kubectl_describe_does(kubeconfig: str) -> None:
    one = run(kubeconfig, "explain", "mtgpupod/notebook").stdout
    assert one.startswith("MtgpuPod default/notebook")
    assert run(kubeconfig, "explain", "mtgpupod", "notebook").stdout == one
    assert run(kubeconfig, "explain", "job", "x").stderr.startswith("job x: must be NAME, pod/NAME")


def test_errors_of_the_server_are_written_as_by_kubectl(kubeconfig: str) -> None:
    result = run(kubeconfig, "explain", "none")
    text = 'Error from server (NotFound): pods "none" not found\n'
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", text)


def test_unknown_format_is_an_input_error(kubeconfig: str) -> None:
    assert run(kubeconfig, "doctor", "-o", "wide").exit_code == 2
    assert run(kubeconfig, "top", "-o", "jsonpath={.nodes}").exit_code == 2


def test_requests_have_the_rights_of_the_impersonated_user(tmp_path: Path) -> None:
    """kim may do nothing herself; her group may list what `top` reads."""
    tls, path = self_signed(tmp_path), str(tmp_path / "kubeconfig")
    server = ApiServer(tokens={"admin": User("admin", ("system:masters",))}, restricted=["kim"])
    with running(server, tls=tls) as url:
        write_kubeconfig(tmp_path / "kubeconfig", url, Path(tls[0]).read_bytes(), "admin")
        api = Api.connect(path)
        fill(api)
        grant(api, "gpu-team")
        api.close()
        refused = run(path, "top", "node", "--as", "kim")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr.startswith("Error from server (Forbidden): ")
        assert 'User "kim" cannot' in refused.stderr
        allowed = run(path, "top", "node", "--as", "kim", "--as-group", "others", "--as-group", "gpu-team")
        assert allowed.exit_code == 0, allowed.stderr
        assert allowed.stdout == run(path, "top", "node").stdout
        assert run(path, "top", "--as-group", "gpu-team").exit_code == 2


def grant(api: Api, group: str) -> None:
    path = "/apis/rbac.authorization.k8s.io/v1"
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["list", "get"]}]
    api.create(f"{path}/clusterroles", {"metadata": {"name": "reads"}, "rules": rules})
    subject = {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": group}
    role = {"kind": "ClusterRole", "apiGroup": "rbac.authorization.k8s.io", "name": "reads"}
    body = {"metadata": {"name": "reads"}, "subjects": [subject], "roleRef": role}
    api.create(f"{path}/clusterrolebindings", body)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("90", 90.0), ("1s", 1.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("250ms", 0.25)]
)
def test_durations_are_those_of_kubectl(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1x", "s", "-1", "1 s", "-1s", "١s"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(click.BadParameter, match="such as 1s, 2m or 3h"):
        Duration().convert(text, None, None)


def test_timeout_of_zero_is_no_limit() -> None:
    assert Connection().seconds(30.0) == 30.0
    assert Connection(timeout=2.0).seconds(30.0) == 2.0
    assert Connection(timeout=0.0).seconds(30.0) is None


def test_request_timeout_ends_a_request_that_nobody_answers(tmp_path: Path) -> None:
    """The kernel accepts connections to a listening socket, and the test never reads from them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{silent.getsockname()[1]}", None, "admin")
        result = run(str(tmp_path / "kubeconfig"), "top", "--request-timeout", "50ms")
    assert result.exit_code == 1
    assert result.stderr.startswith("Unable to connect to the server: ")
    assert "timed out" in result.stderr


INSTALLED = "gpu-sharing"
"""A namespace of an installation that is not the default one."""


def install_elsewhere(api: Api) -> None:
    """Settings and an agent that is not ready, as an installation has them."""
    fill(api)
    api.create("/api/v1/namespaces", {"metadata": {"name": INSTALLED}})
    core, apps = f"/api/v1/namespaces/{INSTALLED}", f"/apis/apps/v1/namespaces/{INSTALLED}"
    api.create(
        f"{core}/configmaps", {"metadata": {"name": "mgpu-config-x"}, "data": {"mgpu.yaml": "cardPolicy: spread"}}
    )
    template = {
        "metadata": {"labels": {"app": "mgpu"}},
        "spec": {
            "containers": [{"name": "c", "image": "mgpu"}],
            "volumes": [{"name": "settings", "configMap": {"name": "mgpu-config-x"}}],
        },
    }
    spec = {"selector": {"matchLabels": {"app": "mgpu"}}, "template": template}
    api.create(f"{apps}/deployments", {"metadata": {"name": "mgpu-scheduler"}, "spec": spec})
    raw = agent(ready=False, namespace=INSTALLED)
    made = api.create(f"{core}/pods", raw)
    api.replace(f"{core}/pods/{raw['metadata']['name']}/status", {**made, "status": raw["status"]})


def test_installation_in_another_namespace_has_its_settings_and_agents(tmp_path: Path) -> None:
    with served(tmp_path, install_elsewhere) as path:
        option = ("--mgpu-namespace", INSTALLED)
        assert "spread" in json.loads(run(path, "explain", "waits", "-o", "json", *option).stdout)["policy"]
        assert "binpack" in json.loads(run(path, "explain", "waits", "-o", "json").stdout)["policy"]
        usage = json.loads(run(path, "inspect", "n1", "--usage", "-o", "json", *option).stdout)["usage"]
        assert usage["n1"]["unknown"].startswith("the agent is not ready")
        variable = CliRunner(env={"MGPU_NAMESPACE": INSTALLED})
        settings = [variable.invoke(plugin, ["doctor", "--kubeconfig", path, "-o", "json"])]
        settings += [
            run(path, "doctor", "-o", "json", name, INSTALLED) for name in ("--mgpu-namespace", "--namespace", "-n")
        ]
        found = {json.loads(result.stdout)["checks"][0]["message"] for result in settings}
        assert found == {f"ConfigMap {INSTALLED}/mgpu-config-x"}


def test_program_without_arguments_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl-mgpu"])
    with pytest.raises(SystemExit) as ended:
        kubectl.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: kubectl mgpu ")
