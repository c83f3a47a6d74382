"""The webhook configurations in manifests/ agree with the code."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu.dialects import is_placement_annotation, mtgpu
from mgpu.dialects.mgpu import MULTIPLE
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import MTGPU_PREFIX, vocabulary_of
from mgpu.settings import load_settings

FILE = Path(__file__).parents[2] / "manifests" / "base" / "webhook.yaml"
MUTATING, VALIDATING = (document for document in yaml.safe_load_all(FILE.read_text()))
CONFIGURATIONS = pytest.mark.parametrize("configuration", [MUTATING, VALIDATING], ids=["mutating", "validating"])


def hook(configuration: Any) -> Any:
    """Return the webhook for pods."""
    return configuration["webhooks"][0]


@CONFIGURATIONS
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
def test_match_conditions_select_pods_with_a_resource_of_a_vocabulary(configuration: Any, resource: str) -> None:
    expression = hook(configuration)["matchConditions"][0]["expression"]
    (pattern,) = re.findall(r"name[.]matches\( '(.+?)'\)", expression)
    own = configuration is VALIDATING and resource == SHARE  # the validation denies it alone
    assert bool(re.search(pattern, resource)) == (own or vocabulary_of(resource) is not None)


@CONFIGURATIONS
@pytest.mark.parametrize(
    ("key", "asked"),
    [
        *((f"vke.volcengine.com/{name}", True) for name in ("container-multiple-gpu", "assumed")),
        *((f"vke.volcengine.com/gpu-index-container-{name}", True) for name in ("", "c", "0")),
        *((f"ALIYUN_COM_GPU_MEM_{name}", True) for name in ("IDX", "DEV", "POD", "ASSUME_TIME", "ASSIGNED", "UNIT")),
        *((f"lsalab.nthu/{name}", True) for name in ("GPUID", "gpu_request", "x")),
        ("scheduler.framework.gpushare.allocation", True),
        ("scheduling.koordinator.sh/device-allocated", True),
        *(
            (f"mgpu.io/{name}", True)
            for name in ("container-devices", "slices-given", "seal", "resized", "resize-applied")
        ),
        *((f"mgpu.io/{name}", False) for name in ("card-uuids", "same-card-group", "seals", "x-seal", "resize")),
        *((name, False) for name in ("team", "vke.volcengine.com/mgpu-compute-policy", "scheduling.koordinator.sh/x")),
        *(
            (name, False)
            for name in ("xALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_IDXX", "vkeXvolcengine.com/assumed")
        ),
    ],
)
def test_match_conditions_select_pods_with_a_reserved_annotation(configuration: Any, key: str, asked: bool) -> None:
    """A record on a pod without request reaches the webhook too, because an update could remove the request."""
    patterns = set(re.findall(r"key[.]matches\( '(.+?)'\)", hook(configuration)["matchConditions"][0]["expression"]))
    (pattern,) = patterns
    assert bool(re.search(pattern, key)) == asked
    assert asked == (is_placement_annotation(key) or key == MULTIPLE or key.startswith(MTGPU_PREFIX))


@pytest.mark.parametrize(
    ("configuration", "path", "names"),
    [
        (MUTATING, "/mutate", ["mutate.mgpu.io"]),
        (VALIDATING, "/validate", ["validate.mgpu.io", "mtgpupods.mgpu.io"]),
    ],
)
def test_failure_policy_fail_applies_only_where_needed(configuration: Any, path: str, names: list[str]) -> None:
    own = load_settings().webhook
    assert configuration["metadata"]["name"] == own.configuration
    assert [webhook["name"] for webhook in configuration["webhooks"]] == names
    service = {"name": own.service, "namespace": own.namespace, "path": path, "port": 443}
    for webhook in configuration["webhooks"]:
        assert webhook["clientConfig"] == {"service": service}
        assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["timeoutSeconds"]) == ("Fail", "None", 5)
        assert webhook["matchConditions"]
        assert {rule["scope"] for rule in webhook["rules"]} == {"Namespaced"}
        assert all("DELETE" not in rule["operations"] for rule in webhook["rules"])


def test_status_of_mtgpupods_is_not_reviewed() -> None:
    (rule,) = VALIDATING["webhooks"][1]["rules"]
    group, _, version = mtgpu.API_VERSION.partition("/")
    assert rule == {
        "apiGroups": [group],
        "apiVersions": [version],
        "resources": [mtgpu.COLLECTION.rpartition("/")[2]],
        "operations": ["CREATE", "UPDATE"],
        "scope": "Namespaced",
    }


def test_priority_class_of_occupy_pods_does_not_preempt() -> None:
    found = yaml.safe_load((FILE.parent / "priority-classes.yaml").read_text())
    assert found["metadata"]["name"] == load_settings().dialects.mtgpu.occupy_priority_class
    assert (found["value"], found["preemptionPolicy"]) == (10**9, "Never")
    assert not found.get("globalDefault")
