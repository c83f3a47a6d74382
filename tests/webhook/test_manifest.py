"""The configurations that the API server gets agree with what the code knows."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu.dialects.node_resources import SHARE
from mgpu.dialects.vocabulary import vocabulary_of
from mgpu.settings import load_settings

FILE = Path(__file__).parents[2] / "manifests" / "base" / "webhook.yaml"
MUTATING, VALIDATING = (document for document in yaml.safe_load_all(FILE.read_text()))


def hook(configuration: Any) -> Any:
    (webhook,) = configuration["webhooks"]
    return webhook


@pytest.mark.parametrize("configuration", [MUTATING, VALIDATING], ids=["mutating", "validating"])
@pytest.mark.parametrize(
    "resource",
    [
        *("vke.volcengine.com/mgpu-core", "vke.volcengine.com/mgpu-memory", "vke.volcengine.com/mgpu-cores"),
        *("aliyun.com/gpu-mem", "aliyun.com/gpu-count", "aliyun.com/gpu", "cpu", "memory", "mgpu.io/share"),
        *("koordinator.sh/gpu", "koordinator.sh/gpu.shared", "koordinator.sh/rdma", "xkoordinator.sh/gpu"),
        *("nvidia.com/gpu", "nvidia.com/gpu-4gb", "nvidia.com/gpu-gb", "nvidia.com/mig-1g.10gb.me", "nvidia.com/gpux"),
        *("nvidia.com/gpu-4Gi", "nvidia.com/gpu-0gb", "nvidia.com/gpu-4", "nvidia.com/gpu-a100", "nvidia.com/mig-foo"),
    ],
)
def test_a_pod_reaches_the_webhook_exactly_for_the_names_of_a_vocabulary(configuration: Any, resource: str) -> None:
    expression = hook(configuration)["matchConditions"][0]["expression"]
    (pattern,) = re.findall(r"name\.matches\( '(.+?)'\)", expression)
    own = configuration is VALIDATING and resource == SHARE  # denied where it stands alone
    assert bool(re.search(pattern, resource)) == (own or vocabulary_of(resource) is not None)


@pytest.mark.parametrize(("configuration", "path"), [(MUTATING, "/mutate"), (VALIDATING, "/validate")])
def test_failing_closed_is_kept_to_what_needs_it(configuration: Any, path: str) -> None:
    webhook, own = hook(configuration), load_settings().webhook
    assert configuration["metadata"]["name"] == own.configuration
    service = {"name": own.service, "namespace": own.namespace, "path": path, "port": 443}
    assert webhook["clientConfig"] == {"service": service}
    assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["timeoutSeconds"]) == ("Fail", "None", 5)
    assert {rule["scope"] for rule in webhook["rules"]} == {"Namespaced"}
    assert all("DELETE" not in rule["operations"] for rule in webhook["rules"])
