"""Commands that list the objects of an API server show ResourceClaims."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mgpu.cli import inspect_gpushare
from mgpu.cli.main import main
from mgpu.cli.progress import CountingApi
from mgpu.kube import Api, ApiError
from mgpu.model.resource_claims import CLASSES
from tests import builders as b
from tests.claim_objects import CLASS, Raw, claim
from tests.mgpu.cli.served import ON_A_TERMINAL, served
from tests.mgpu.cli.test_inspect import GPUSHARE

_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims"


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("api"), fill) as kubeconfig:
        yield kubeconfig


def fill(api: Api) -> None:
    there = b.node()
    there["status"]["capacity"] |= GPUSHARE
    api.create("/api/v1/nodes", there)
    api.create("/api/v1/namespaces", {"metadata": {"name": "ml"}})
    api.create(CLASSES, CLASS)
    for raw in (claim("train", 1), claim("waits", of_pod="uid-p")):
        made = api.create(_CLAIMS, {**raw, "status": {}})
        if raw["status"]:
            api.replace(f"{_CLAIMS}/{raw['metadata']['name']}/status", {**made, "status": raw["status"]})


def run(kubeconfig: str, command: str, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
    result = CliRunner(env=env).invoke(main, [command, "--kubeconfig", kubeconfig, "--from", "api", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_inspect_shows_the_claims_that_hold_cards_and_those_that_wait(kubeconfig: str) -> None:
    map_of_cards = run(kubeconfig, "inspect", env=ON_A_TERMINAL).stdout
    assert "A claim ml/train · 30% 8 GiB on 1" in map_of_cards
    text = run(kubeconfig, "inspect").stdout
    assert "   claim ml/train\n" in text
    assert "Waiting for cards: claim ml/waits" in text
    answer: Any = json.loads(run(kubeconfig, "inspect", "-o", "json").stdout)
    assert answer["nodes"]["n1"]["cards"][1]["holders"] == ["claim ml/train/gpu"]
    assert answer["pending"] == ["claim ml/waits"]


def test_top_shows_claims_with_the_vocabulary_dra(kubeconfig: str) -> None:
    answer: Any = json.loads(run(kubeconfig, "top", "-o", "json").stdout)
    assert [(row["pod"], row["dialect"]) for row in answer["holders"]] == [("claim ml/train", "dra")]


def test_user_who_may_not_list_claims_is_told_that_they_are_missing(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ForbiddenApi(CountingApi):
        def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[Raw], str]]:
            if "/resource.k8s.io/" in path:
                raise ApiError(403, "Forbidden", "you may not list it")
            return super().pages(path, **query)

    monkeypatch.setattr("mgpu.cli.sources.CountingApi", ForbiddenApi)
    result = run(kubeconfig, "inspect", "-o", "json")
    assert "ResourceClaims are omitted, and what they hold of the cards: you may not list it" in result.stderr
    assert json.loads(result.stdout)["nodes"]["n1"]["cards"][1]["holders"] == []
    assert "you may not list it" not in run(kubeconfig, "top").stdout


def test_cluster_without_the_api_of_claims_is_shown(kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes before 1.34."""

    class OldApi(CountingApi):
        def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[Raw], str]]:
            if "/resource.k8s.io/" in path:
                raise ApiError(404, "", "404 page not found")
            return super().pages(path, **query)

    monkeypatch.setattr("mgpu.cli.sources.CountingApi", OldApi)
    result = run(kubeconfig, "inspect", "-o", "json")
    assert "ResourceClaims" not in result.stderr
    assert json.loads(result.stdout)["pending"] == []


def test_gpushares_table_counts_claims(kubeconfig: str) -> None:
    result = CliRunner().invoke(inspect_gpushare.main, ["--kubeconfig", kubeconfig, "-o", "json"])
    (node,) = json.loads(result.stdout)["nodes"]
    assert node["devs"][1]["pods"] == [{"name": "claim train", "namespace": "ml", "usedGPU": 8}]
