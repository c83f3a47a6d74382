"""The resources for which a ResourceQuota charges a GPU pod, after the webhooks (docs/quotas.md)."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import dialects
from mgpu.model.pods import read_pod
from mgpu.settings import Settings, load_settings
from playground.apiserver.pod_rules import usage
from tests.builders import pod
from tests.mgpu.serving.reviews import patched
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create

SETTINGS = load_settings()
MIB = load_settings("dialects: {gpushare: {memoryUnit: MiB}}")
MGPU, KOORDINATOR = "vke.volcengine.com/mgpu-", "koordinator.sh/gpu"


def charged(asked: dict[str, str], settings: Settings = SETTINGS) -> dict[str, Fraction]:
    raw = pod("p", {"name": "c", "resources": {"requests": asked}})
    return charged_to(patched(raw, mutate(raw, settings).patch))


def charged_to(completed: dict[str, Any]) -> dict[str, Fraction]:
    found = usage(completed)
    return {name.removeprefix("requests."): n for name, n in found.items() if name.startswith("requests.")}


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        ({MGPU + "core": "50", MGPU + "memory": "1024"}, {MGPU + "core": 50, MGPU + "memory": 1024}),
        ({MGPU + "core": "200"}, {MGPU + "core": 200}),
        ({"aliyun.com/gpu-mem": "16"}, {"aliyun.com/gpu-mem": 16}),
        ({KOORDINATOR: "50"}, {KOORDINATOR + "-core": 50, KOORDINATOR + "-memory-ratio": 50}),
        ({KOORDINATOR + "-memory": "8Gi"}, {KOORDINATOR + "-memory": 8 << 30, "mgpu.io/share": 1}),
        ({"nvidia.com/gpu": "2"}, {"nvidia.com/gpu": 2}),
        ({"nvidia.com/mig-1g.10gb": "1"}, {"nvidia.com/mig-1g.10gb": 1}),
        ({"nvidia.com/gpu-4gb": "1"}, {"nvidia.com/gpu-4gb": 1}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_pod_is_charged_for_the_resources_after_mutation(asked: dict[str, str], counted: dict[str, int]) -> None:
    assert charged(asked) == counted


def test_gpu_memory_in_mib_is_charged_with_a_share() -> None:
    assert charged({"aliyun.com/gpu-mem": "2048"}, MIB) == {"aliyun.com/gpu-mem": 2048, "mgpu.io/share": 1}


LEAST = load_settings(
    "dialects: {mgpu: {minGPUMemory: 1000}, gpushare: {memoryUnit: MiB, minGPUMemory: 3000}, "
    "koordinator: {minGPUMemory: 2000, minGPUMemoryRatio: 7}}"
)
SHARES = {
    MGPU + "core": st.integers(1, 400),
    MGPU + "memory": st.integers(1, 5000),
    "aliyun.com/gpu-mem": st.integers(1, 5000),
    KOORDINATOR: st.integers(1, 400),
    KOORDINATOR + "-core": st.integers(1, 400),
    KOORDINATOR + "-memory": st.integers(1, 10_000 << 20),
    KOORDINATOR + "-memory-ratio": st.integers(1, 400),
    KOORDINATOR + ".shared": st.integers(1, 5),
}
ASKS = st.sampled_from(
    [
        (MGPU + "core", MGPU + "memory"),
        ("aliyun.com/gpu-mem",),
        (KOORDINATOR,),
        (KOORDINATOR + "-memory",),
        (KOORDINATOR + "-memory-ratio",),
        (KOORDINATOR + "-core", KOORDINATOR + "-memory"),
        (KOORDINATOR + "-core", KOORDINATOR + "-memory-ratio"),
        (KOORDINATOR + ".shared", KOORDINATOR + "-memory"),
        (KOORDINATOR + ".shared", KOORDINATOR + "-core", KOORDINATOR + "-memory"),
        (KOORDINATOR + ".shared", KOORDINATOR + "-core", KOORDINATOR + "-memory-ratio"),
    ]
).flatmap(lambda names: st.fixed_dictionaries({name: SHARES[name] for name in names}))


@given(ASKS)
def test_property_charged_memory_limits_the_cards_of_shares(amounts: dict[str, int]) -> None:
    """The quota's memory divided by the least memory of a share limits the number of cards (docs/quotas.md)."""
    asked = {name: str(amount) for name, amount in amounts.items()}
    raw = pod("p", {"name": "c", "resources": {"requests": asked}})
    if "koordinator" not in str(asked) and amounts.get(MGPU + "core", 0) > 100:
        raw["metadata"]["annotations"] = {
            "vke.volcengine.com/container-multiple-gpu": str(-(-amounts[MGPU + "core"] // 100)),
            "vke.volcengine.com/mgpu-compute-policy": "native-burst-share",
        }
    completed = patched(raw, mutate(raw, LEAST).patch)
    if validate_create(completed, LEAST):
        return
    request = dialects.read_request(read_pod(completed), LEAST)
    assert request is not None
    touched = sum(container.cards for container in request.containers if not container.whole)
    counted = charged_to(completed)
    memory = counted.get(MGPU + "memory", Fraction()) / 1000 + counted.get("aliyun.com/gpu-mem", Fraction()) / 3000
    in_bytes = counted.get(KOORDINATOR + "-memory", Fraction()) / (2000 << 20)
    assert touched <= memory + in_bytes + counted.get(KOORDINATOR + "-memory-ratio", Fraction()) / 7


def test_four_bytes_on_four_cards_are_denied() -> None:
    """Otherwise such a pod would prevent whole cards on a node for all other tenants."""
    raw = pod(
        "p", {"name": "c", "resources": {"requests": {KOORDINATOR + ".shared": "4", KOORDINATOR + "-memory": "4"}}}
    )
    (problem, *_) = validate_create(patched(raw, mutate(raw, SETTINGS).patch), SETTINGS)
    assert problem.field == f"spec.containers[0].resources.requests[{KOORDINATOR}-memory]"
    assert "must be at least 1Mi per card, not 4 bytes over 4 cards" in problem.message


@pytest.mark.parametrize("other", ["-memory", "-memory-ratio"])
def test_gpu_shared_is_charged_for_each_card(other: str) -> None:
    amount = {"-memory": "8Gi", "-memory-ratio": "40"}[other]
    counted = charged({KOORDINATOR + ".shared": "4", KOORDINATOR + other: amount})
    assert counted[KOORDINATOR + ".shared"] == 4
