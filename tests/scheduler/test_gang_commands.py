"""`mgpu inspect` and `mgpu explain` show gangs that are not complete, and `mgpu top` counts gated pods apart."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mgpu.cli.kubectl import plugin
from mgpu.cli.progress import CountingApi
from mgpu.kube import Api, ApiError
from mgpu.model.gangs import COSCHEDULING, POD_GROUP_PATHS, VOLCANO
from mgpu.model.pods import VOLCANO_GROUP
from playground.installation import manifests
from tests.builders import share
from tests.mgpu.cli.served import served
from tests.scheduler.explained_cluster import DEFINITIONS, RECORD, add, add_node

GROUPS = f"/apis/{VOLCANO}/v1beta1/namespaces/default/podgroups"
FULL = "insufficient GPU (2 cards: 2 core 20 percent short) (beside the other members of its gang)"


def pod_group_definition() -> dict[str, Any]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"podgroups.{VOLCANO}"},
        "spec": {"group": VOLCANO, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def fill(api: Api) -> None:
    """Node n1 with two cards. Member job-0 of a gang of Volcano has one of them, and the other is free."""
    for manifest in manifests():
        if manifest["kind"] == "CustomResourceDefinition":
            api.create(DEFINITIONS, manifest)
    api.create(DEFINITIONS, pod_group_definition())
    group = {"apiVersion": f"{VOLCANO}/v1beta1", "kind": "PodGroup", "metadata": {"name": "job"}}
    api.create(GROUPS, {**group, "spec": {"minMember": 3}})
    add_node(api, "n1", 2)
    for i in range(3):
        bound = {"node": "n1", "annotations": {VOLCANO_GROUP: "job", **RECORD}}
        raw = share(f"job-{i}", 60, **(bound if i == 0 else {"annotations": {VOLCANO_GROUP: "job"}}))
        add(api, raw)
    raw = share("gated", 60)
    raw["spec"]["schedulingGates"] = [{"name": "team/quota"}]
    raw["metadata"]["labels"] = {f"{COSCHEDULING}/pod-group": "unknown"}
    add(api, raw)


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("api"), fill) as kubeconfig:
        yield kubeconfig


def run(kubeconfig: str, *arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(plugin, [*arguments, "--kubeconfig", kubeconfig])
    assert result.exit_code == 0, result.output
    return result


def found(kubeconfig: str, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(run(kubeconfig, *arguments, "-o", "json").stdout))


def test_inspect_shows_gangs_with_the_reason_why_the_next_member_does_not_fit(kubeconfig: str) -> None:
    text = run(kubeconfig, "inspect").stdout
    job = f"1 of 3 placed; 1 more fits now, but job-2 does not fit: 1 node: {FULL}; waiting: job-1, job-2"
    assert f"\nGang default/job: {job}\n" in text
    unknown = f"0 placed; how many it needs is unknown: its PodGroup ({COSCHEDULING}) is not known"
    assert f"\nGang default/unknown: {unknown}; with scheduling gates: gated\n" in text


def test_inspect_json_has_the_same_facts(kubeconfig: str) -> None:
    job, unknown = found(kubeconfig, "inspect")["gangs"]
    assert job == {
        "namespace": "default",
        "name": "job",
        "source": VOLCANO,
        "needed": 3,
        "placed": 1,
        "waiting": ["default/job-1", "default/job-2"],
        "gated": [],
        "missing": 0,
        "fits": 1,
        "misfit": {"pod": "default/job-2", "reason": f"1 node: {FULL}"},
    }
    assert (unknown["needed"], unknown["gated"], unknown["fits"]) == (None, ["default/gated"], None)


@pytest.mark.parametrize("more", [(), ("--node", "n1")])
def test_explain_shows_the_gang_of_a_waiting_pod(kubeconfig: str, more: tuple[str, ...]) -> None:
    answer = found(kubeconfig, "explain", "job-1", "-n", "default", *more)
    gang, cards = answer["verdict"]
    assert gang.startswith("It is a member of gang default/job: 1 of 3 placed; 1 more fits now, but job-2 does not fit")
    assert cards == "Its own cards fit on 1 of 1 node."
    assert answer["gang"]["misfit"]["pod"] == "default/job-2"


def test_explain_of_a_pod_that_has_its_node_shows_no_gang(kubeconfig: str) -> None:
    assert found(kubeconfig, "explain", "job-0", "-n", "default")["gang"] is None


class Guarded(CountingApi):
    """The API of a user who may not read PodGroups."""

    def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        self._check(path)
        return super().pages(path, **query)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        self._check(path)
        return super().get(path, **query)

    def _check(self, path: str) -> None:
        if path in (POD_GROUP_PATHS[VOLCANO], f"{GROUPS}/job"):
            raise ApiError(403, "Forbidden", 'User "u" cannot read resource "podgroups"')


@pytest.mark.parametrize("command", [("inspect",), ("explain", "job-1", "-n", "default")])
def test_without_the_right_to_read_pod_groups_the_sizes_are_unknown(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("mgpu.cli.sources.CountingApi", Guarded)
    result = run(kubeconfig, *command, "-o", "json")
    answer = json.loads(result.stdout)
    gang = answer["gangs"][0] if "gangs" in answer else answer["gang"]
    assert (gang["name"], gang["needed"], gang["placed"]) == ("job", None, 1)
    assert result.stderr == (
        'PodGroups are omitted; the sizes of their gangs are unknown: User "u" cannot read resource "podgroups"\n'
    )


def test_top_counts_gated_pods_apart(kubeconfig: str) -> None:
    assert run(kubeconfig, "top").stdout.splitlines()[0] == "1 node, 2 cards (1 idle); 2 GPU pods waiting, 1 gated"
    answer = found(kubeconfig, "top")
    assert (answer["pending"], answer["gated"]) == (3, 1)
