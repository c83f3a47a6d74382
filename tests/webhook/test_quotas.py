"""Under which names a ResourceQuota counts a GPU pod: docs/quotas.md. Quota is charged after the webhooks."""

from fractions import Fraction

import pytest

from mgpu.settings import Settings, load_settings
from playground.apiserver.quotas import usage
from tests.builders import pod
from tests.mgpu.serving.reviews import patched
from webhook.mutate import mutate

SETTINGS = load_settings()
MIB = load_settings("dialects: {gpushare: {memoryUnit: MiB}}")
MGPU, KOORDINATOR = "vke.volcengine.com/mgpu-", "koordinator.sh/gpu"


def charged(asked: dict[str, str], settings: Settings = SETTINGS) -> dict[str, Fraction]:
    raw = pod("p", {"name": "c", "resources": {"requests": asked}})
    found = usage(patched(raw, mutate(raw, settings).patch))
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
def test_a_pod_is_charged_by_the_names_that_stand_in_it(asked: dict[str, str], counted: dict[str, int]) -> None:
    assert charged(asked) == counted


def test_gpu_memory_in_mib_counts_a_share_too() -> None:
    assert charged({"aliyun.com/gpu-mem": "2048"}, MIB) == {"aliyun.com/gpu-mem": 2048, "mgpu.io/share": 1}
