"""`mgpu inspect` against an API server."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mgpu.cli.inspect import render_overview
from mgpu.cli.main import main
from mgpu.cli.progress import CountingApi
from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError
from mgpu.presentation.card_views import NodeView
from mgpu.presentation.overview import Overview
from mgpu.presentation.terminal import Terminal
from tests.agent_pods import SINCE, agent
from tests.builders import GIB, mtgpupod, node, pod, share
from tests.mgpu.cli.served import ON_A_TERMINAL, served

CRDS = Path(__file__).parents[3] / "manifests" / "crds"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GPUSHARE = {"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"}


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("api"), fill) as kubeconfig:
        yield kubeconfig


def fill(api: Api) -> None:
    there = node()
    there["status"]["capacity"] |= GPUSHARE
    api.create("/api/v1/nodes", there)
    api.create("/api/v1/nodes", node("n2"))
    record = {"vke.volcengine.com/gpu-index-container-c": "1", "vke.volcengine.com/assumed": "true"}
    for raw in (
        share("runs", node="n1", annotations=record | {"mgpu.io/spread-group": "web"}),
        share("waits", annotations={"mgpu.io/card-models": "H100"}),
        pod("plain", {"name": "c", "image": "x"}),
    ):
        api.create("/api/v1/namespaces/default/pods", raw)
    api.close()


def inspect(kubeconfig: str, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner(env=env).invoke(main, ["inspect", "--kubeconfig", kubeconfig, *arguments])


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_inspect_json_lists_nodes_cards_and_holders(kubeconfig: str) -> None:
    answer = found(inspect(kubeconfig, "-o", "json"))
    assert [card["holders"] for card in answer["nodes"]["n1"]["cards"]] == [[], ["default/runs/c"]]
    assert answer["nodes"]["n2"]["cards"] == []
    assert answer["pending"] == ["default/waits"]
    assert answer["unclear"] == {}
    assert answer["constraints"] == {"default/runs": {"spread-group": "web"}, "default/waits": {"card-models": "H100"}}
    assert answer["groups"] == [
        {
            "constraint": "spread-group",
            "namespace": "default",
            "name": "web",
            "pods": ["default/runs"],
            "cards": [{"node": "n1", "card": "1"}],
        }
    ]


def test_inspect_prints_the_card_map_and_the_pods_that_wait(kubeconfig: str) -> None:
    text = inspect(kubeconfig, env=ON_A_TERMINAL).stdout
    assert "A default/runs · 50% 1 GiB on 1 · spread-group web" in text
    assert "Waiting for cards: default/waits (card-models H100)" in text
    assert "spread-group default/web: 1 pod on card 1 of n1" in text


def test_inspect_shortens_long_lists() -> None:
    """There may be thousands of nodes without GPUs, and of pods from before mgpu was installed."""
    pods = tuple(f"default/p{i:03}" for i in range(30))
    nodes = tuple(NodeView(f"n{i:03}", ()) for i in range(30))
    found = Overview(nodes, pods, unclear={f"Pod {pod}": "no record" for pod in pods})
    with Terminal(width=1000) as terminal, terminal.capture() as captured:
        terminal.print(render_overview(found))
    bare, waiting, *odd = captured.get().splitlines()
    assert bare.endswith("n018, n019 and 10 more")
    assert waiting.endswith("default/p019 and 10 more")
    assert (len(odd), odd[-1]) == (21, "… and 10 more (-o json has all)")


def test_inspect_of_a_cluster_without_nodes_prints_one_line() -> None:
    with Terminal() as terminal, terminal.capture() as captured:
        terminal.print(render_overview(Overview(())))
    assert captured.get() == "There are no nodes.\n"


def test_inspect_of_some_nodes_lists_only_these(kubeconfig: str) -> None:
    assert list(found(inspect(kubeconfig, "n2", "-o", "json"))["nodes"]) == ["n2"]


def test_inspect_of_a_missing_node_is_an_error(kubeconfig: str) -> None:
    result = inspect(kubeconfig, "n1", "n9")
    assert (result.exit_code, result.stderr) == (1, "Error: no node is named n9\n")


def test_inspect_prefers_the_device_to_node_status(kubeconfig: str) -> None:
    api = Api.connect(kubeconfig)
    api.create(DEFINITIONS, yaml.safe_load((CRDS / "device.yaml").read_text()))
    resources = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "80Gi"}
    device = {
        "apiVersion": "scheduling.koordinator.sh/v1alpha1",
        "kind": "Device",
        "metadata": {"name": "n1"},
        "spec": {"devices": [{"type": "gpu", "id": "GPU-x", "minor": 1, "health": False, "resources": resources}]},
    }
    api.create("/apis/scheduling.koordinator.sh/v1alpha1/devices", device)
    (card,) = found(inspect(kubeconfig, "-o", "json"))["nodes"]["n1"]["cards"]
    assert (card["uuid"], card["healthy"], card["holders"]) == ("GPU-x", False, ["default/runs/c"])
    api.close()


def test_inspect_shows_mtgpupods_and_the_rest_of_their_cards(kubeconfig: str) -> None:
    without = found(inspect(kubeconfig, "-o", "json"))
    assert (without["mtgpupods"], without["accounting"]["n1"]) == ({}, {"free": 0, "gpuids": []})
    assert "free cards" not in inspect(kubeconfig, env=ON_A_TERMINAL).stdout
    api = Api.connect(kubeconfig)
    api.create(DEFINITIONS, yaml.safe_load((CRDS / "mtgpupod.yaml").read_text()))
    third = node("n3")
    third["status"]["capacity"] |= GPUSHARE
    api.create("/api/v1/nodes", third)
    bound = mtgpupod("runs-named", request="0.4", node="n3", memory=3 * GIB)
    waits = mtgpupod("waits-named", "asdfg", node="n3")
    path = "/apis/lsalab.nthu/v1/namespaces/default/mtgpupods"
    first = found(inspect(kubeconfig, "-o", "json"))["nodes"]["n3"]["cards"][0]["uuid"]
    wants = {"type": "Bound", "status": "False", "reason": "ResourceExceeded", "message": "full"}
    odd = {"type": "Degraded", "status": "True", "reason": "OtherCard", "message": "elsewhere"}
    for raw, status in ((bound, {"BoundDeviceID": first, "conditions": [odd]}), (waits, {"conditions": [wants]})):
        made = api.create(path, raw)
        api.replace(f"{path}/{made['metadata']['name']}/status", {**made, "status": {"phase": "Pending", **status}})
    api.close()
    answer = found(inspect(kubeconfig, "n3", "-o", "json"))
    left = {"gpuid": "zxcvb", "card": 0, "core": 60, "memory": 13 * GIB}
    assert answer["accounting"] == {"n3": {"free": 1, "gpuids": [left]}}
    assert answer["mtgpupods"]["default/waits-named"]["reason"] == "ResourceExceeded"
    assert answer["mtgpupods"]["default/runs-named"]["card"] == first
    text = " ".join(inspect(kubeconfig, "n3", env=ON_A_TERMINAL).stdout.split())
    assert "core left memory left n3 1 zxcvb 0 60% 13.0 GiB" in text
    assert "default/waits-named (GPUID asdfg: ResourceExceeded)" in text
    assert "MtgpuPod default/runs-named: degraded: elsewhere" in text


class Guarded(CountingApi):
    """The API of a user who may not list MtgpuPods."""

    def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        if path == mtgpu.COLLECTION:
            raise ApiError(403, "Forbidden", 'User "u" cannot list resource "mtgpupods" in API group "lsalab.nthu"')
        return super().pages(path, **query)


def test_inspect_without_the_right_to_list_mtgpupods_shows_the_others(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mgpu.cli.sources.CountingApi", Guarded)
    result = inspect(kubeconfig, "n1", "-o", "json")
    assert json.loads(result.stdout)["nodes"]["n1"]["cards"]
    wanted = 'MtgpuPods are omitted; the holdings of their Pods are shown: User "u" cannot list resource "mtgpupods"'
    assert (result.exit_code, result.stderr.startswith(wanted)) == (0, True)


def test_inspect_of_a_cluster_that_does_not_answer_is_an_error() -> None:
    result = inspect("/nowhere/kubeconfig")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_inspect_of_a_node_whose_agent_is_not_ready_names_the_node(tmp_path: Path) -> None:
    def fill_with_agent(api: Api) -> None:
        api.create("/api/v1/nodes", node())
        api.create("/api/v1/nodes", node("n2"))
        for name in ("n1", "n2"):
            raw = agent(name, ready=name == "n2", waiting=None if name == "n2" else "CrashLoopBackOff")
            status = raw.pop("status")
            api.create("/api/v1/namespaces/mgpu-system/pods", raw)
            api.patch(f"/api/v1/namespaces/mgpu-system/pods/{raw['metadata']['name']}/status", {"status": status})
        api.close()

    with served(tmp_path, fill_with_agent) as kubeconfig:
        silent = found(inspect(kubeconfig, "-o", "json"))["agentsNotReady"]
        assert silent == {"n1": {"pod": "agent-n1", "reason": "CrashLoopBackOff", "since": SINCE}}
        assert "n1: its mgpu agent is not ready (CrashLoopBackOff)" in inspect(kubeconfig).stdout
