"""`mgpu doctor` reports a Kueue that counts admitted Pods otherwise than templates; the example counts them alike."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu.cli.doctor.collection import read_kueue
from mgpu.cli.doctor.installation import Finding, Installation
from mgpu.cli.doctor.kueue import CONFIG_MAP_PATH, GROUP, HIDDEN, KEY, check_kueue, count
from mgpu.kube import ApiError
from mgpu.settings import Settings, load_settings
from tests.mgpu.serving.reviews import patched
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create

Raw = dict[str, Any]
KUEUE = Path(__file__).parents[3] / "examples" / "kueue"
EXAMPLE: Raw = yaml.safe_load((KUEUE / "resources.yaml").read_text())
PODS = {"integrations": {"frameworks": ["batch/job", "pod"]}}
IN_MIB = "dialects: {gpushare: {memoryUnit: MiB}}"
SHARE = "mgpu.io/share"

WITH_SHARE = {
    ("", "koordinator.sh/gpu-memory"),
    ("", "koordinator.sh/gpu.shared", "koordinator.sh/gpu-memory"),
    (IN_MIB, "aliyun.com/gpu-mem"),
    (IN_MIB, "aliyun.com/gpu-mem", "aliyun.com/gpu-count"),
}
"""The settings and the resources of the requests that no resource with device ids is part of."""


def sums(requests: dict[str, str], configuration: Raw) -> dict[str, Fraction]:
    return count(requests, configuration.get("resources", {}))


def admitted(template: dict[str, str], settings: Settings) -> dict[str, str]:
    """Return what a Pod with these limits requests after the webhook has completed it."""
    container = {"name": "c", "resources": {"limits": template}}
    raw = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": [container]}}
    pod = patched(raw, mutate(raw, settings).patch)
    assert validate_create(pod, settings) == []
    requests: dict[str, str] = pod["spec"]["containers"][0]["resources"]["requests"]
    return requests


REQUESTS: list[tuple[str, dict[str, str]]] = [
    ("", {"vke.volcengine.com/mgpu-core": "30", "vke.volcengine.com/mgpu-memory": "4096"}),
    ("", {"vke.volcengine.com/mgpu-core": "200"}),
    ("", {"aliyun.com/gpu-mem": "16"}),
    (IN_MIB, {"aliyun.com/gpu-mem": "16384"}),
    (IN_MIB, {"aliyun.com/gpu-mem": "16384", "aliyun.com/gpu-count": "1"}),
    ("", {"koordinator.sh/gpu": "50"}),
    ("", {"koordinator.sh/gpu": "200"}),
    ("", {"koordinator.sh/gpu-memory": "8Gi"}),
    ("", {"koordinator.sh/gpu-memory-ratio": "50"}),
    ("", {"koordinator.sh/gpu-core": "60", "koordinator.sh/gpu-memory": "8Gi"}),
    ("", {"koordinator.sh/gpu-core": "60", "koordinator.sh/gpu-memory-ratio": "50"}),
    ("", {"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory": "8Gi"}),
    ("", {"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-core": "60", "koordinator.sh/gpu-memory-ratio": "50"}),
    ("", {"nvidia.com/gpu": "1"}),
    ("", {"nvidia.com/mig-1g.10gb": "1"}),
    ("", {"nvidia.com/gpu-4gb": "1"}),
]


@pytest.mark.parametrize(("text", "template"), REQUESTS)
def test_example_configuration_counts_template_and_admitted_pod_alike(text: str, template: dict[str, str]) -> None:
    pod = admitted(template, load_settings(text))
    counted = sums(template, EXAMPLE)
    assert counted == sums(pod, EXAMPLE)
    queues = {raw["kind"]: raw for raw in yaml.safe_load_all((KUEUE / "queue.yaml").read_text())}
    (group,) = queues["ClusterQueue"]["spec"]["resourceGroups"]
    assert counted.keys() <= set(group["coveredResources"])
    for flavor in group["flavors"]:
        assert [row["name"] for row in flavor["resources"]] == group["coveredResources"]


def test_page_shows_the_example_configuration() -> None:
    page = (KUEUE.parents[1] / "docs" / "batch.md").read_text()
    (block,) = [text for text in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "transformations:" in text]
    assert yaml.safe_load(block) == EXAMPLE


def test_without_the_configuration_only_these_requests_are_counted_otherwise() -> None:
    different = {
        (text, *template)
        for text, template in REQUESTS
        if sums(template, {}) != sums(admitted(template, load_settings(text)), {})
    }
    assert different == {("", "koordinator.sh/gpu"), *WITH_SHARE}


def test_share_is_added_only_where_no_other_resource_brings_the_cards() -> None:
    with_share = {(text, *template) for text, template in REQUESTS if SHARE in admitted(template, load_settings(text))}
    assert with_share == WITH_SHARE


def test_count_follows_strategy_factor_and_multiplier() -> None:
    """A sum of Kueue's own tests: Retain keeps the input, and outputs are added to requests of the same name."""
    resources = {
        "excludeResourcePrefixes": ["dropped.com/"],
        "transformations": [
            {"input": "a.com/gpu", "strategy": "Replace", "outputs": {"a.com/memory": "5Gi", "a.com/cores": 4}},
            {
                "input": "b.com/gpu",
                "strategy": "Retain",
                "multiplyBy": "b.com/each",
                "outputs": {"a.com/cores": "500m"},
            },
        ],
    }
    requests = {"a.com/gpu": "2", "b.com/gpu": "3", "b.com/each": "4", "a.com/cores": "1", "dropped.com/x": "1"}
    assert count(requests, resources) == {
        "a.com/memory": 10 << 30,
        "a.com/cores": 8 + 6 + 1,
        "b.com/gpu": 3,
        "b.com/each": 4,
    }


def findings(configuration: Raw | str | None, text: str = "", hidden: str = "") -> list[Finding]:
    shown = yaml.safe_dump(configuration) if isinstance(configuration, dict) else configuration
    installed = Installation("mgpu-system", datetime(2026, 1, 1, tzinfo=UTC), "1", load_settings(text), kueue=shown)
    if hidden:
        installed = Installation(
            "mgpu-system", installed.now, "1", installed.settings, kueue=shown, hidden={hidden: "forbidden"}
        )
    return list(check_kueue(installed))


def test_doctor_accepts_the_example_and_equal_configurations() -> None:
    ignores = [{"input": SHARE, "strategy": "Replace"}]
    other = {"input": "koordinator.sh/gpu", "strategy": "Replace", "outputs": {"koordinator.sh/gpu-core": 1}}
    drops = {"excludeResourcePrefixes": ["koordinator.sh/gpu-memory-ratio"], "transformations": [*ignores, other]}
    for resources in (EXAMPLE["resources"], drops):
        (finding,) = findings({**PODS, "resources": resources}, IN_MIB)
        assert (finding.level, finding.remedy) == ("ok", ""), finding


@pytest.mark.parametrize(
    ("configuration", "settings", "named"),
    [
        (
            PODS,
            "",
            ["koordinator.sh/gpu of", "koordinator.sh/gpu-memory of", "koordinator.sh/gpu-memory and mgpu.io/share"],
        ),
        ({**PODS, "resources": {"excludeResourcePrefixes": [SHARE]}}, "", ["koordinator.sh/gpu of a Pod becomes"]),
        (
            {**PODS, "resources": {"quotaCheckStrategy": "IgnoreUndeclared"}},
            "",
            ["koordinator.sh/gpu of a Pod becomes koordinator.sh/gpu-core and koordinator.sh/gpu-memory-ratio"],
        ),
        (
            PODS,
            "dialects: {koordinator: {enabled: false}, gpushare: {memoryUnit: MiB}}",
            ["aliyun.com/gpu-mem of a Pod"],
        ),
        (
            {**PODS, "resources": {"transformations": [{"input": "koordinator.sh/gpu", "outputs": {"a": "?"}}]}},
            "",
            ["'?'"],
        ),
        # Kueue enables "pod" by itself for the pods of Deployments, and counts each of these pods.
        ({"integrations": {"frameworks": ["batch/job", "deployment"]}}, "", ["koordinator.sh/gpu of a Pod becomes"]),
        ("{", "", ["cannot be read"]),
        ("", "", ["there is no ConfigMap kueue-manager-config"]),
    ],
)
def test_doctor_names_what_is_counted_otherwise(configuration: Raw | str, settings: str, named: list[str]) -> None:
    (finding,) = findings(configuration, settings)
    assert (finding.check, finding.level) == ("kueue", "warning")
    assert finding.remedy
    for text in named:
        assert text in finding.message


def test_doctor_finds_nothing_without_kueue_or_without_the_right_to_read_it() -> None:
    assert findings(None) == findings("", hidden=HIDDEN) == []
    for configuration, settings in (({}, ""), (PODS, "dialects: {koordinator: {enabled: false}}")):
        assert [finding.level for finding in findings({"kind": "Configuration", **configuration}, settings)] == ["ok"]


class Cluster:
    """An API server with these objects, by path; an error is the status of the answer."""

    def __init__(self, **objects: Raw | int) -> None:
        self.hidden: list[str] = []
        self._objects = {GROUP: objects["group"], CONFIG_MAP_PATH: objects["config_map"]}

    def get(self, path: str) -> Raw:
        found = self._objects[path]
        if isinstance(found, int):
            raise ApiError(found, "Status", path)
        return found

    def read_if_allowed(self, what: str, read: Callable[[], Raw], otherwise: Raw) -> Raw:
        try:
            return read()
        except ApiError as error:
            if error.status == 403:
                self.hidden.append(what)
            return otherwise


@pytest.mark.parametrize(
    ("cluster", "text", "hidden"),
    [
        (Cluster(group=404, config_map={"data": {KEY: "x"}}), None, []),
        (Cluster(group={"versions": []}, config_map={"data": {KEY: "x"}}), "x", []),
        (Cluster(group={"versions": []}, config_map=404), "", []),
        (Cluster(group={"versions": []}, config_map=403), "", [HIDDEN]),
    ],
)
def test_configuration_is_read_only_where_kueue_is_installed(cluster: Any, text: str | None, hidden: list[str]) -> None:
    assert read_kueue(cluster, cluster.read_if_allowed) == text
    assert cluster.hidden == hidden
