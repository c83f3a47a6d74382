"""What admission changes in a new pod."""

from typing import Any

import pytest

from mgpu.settings import load_settings
from tests.builders import CORE, MEMORY, container, pod, share
from tests.mgpu.serving.reviews import patched
from webhook.mutate import Mutation, mutate

SETTINGS = load_settings()
VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
INDEX = "vke.volcengine.com/gpu-index-container-c"
ASSUMED = "vke.volcengine.com/assumed"


def after(raw: dict[str, Any]) -> dict[str, Any]:
    """The pod after admission, which changes it no further."""
    result = patched(raw, mutate(raw, SETTINGS).patch)
    assert mutate(result, SETTINGS) == Mutation()
    return result


def resources(raw: dict[str, Any]) -> Any:
    return after(raw)["spec"]["containers"][0]["resources"]


@pytest.mark.parametrize(
    "given",
    [
        {"requests": {CORE: "50"}},
        {"limits": {CORE: "50"}},
        {"requests": {CORE: "50"}, "limits": {}},
        {"requests": {CORE: "50"}, "limits": None},
    ],
    ids=["requests", "limits", "empty limits", "null limits"],
)
def test_requests_and_limits_complete_each_other(given: Any) -> None:
    got = resources(pod("p", {"name": "c", "resources": given}))
    assert got == {"requests": {CORE: "50"}, "limits": {CORE: "50"}}


def test_only_gpu_resources_are_completed_and_the_others_stay() -> None:
    given = {"requests": {CORE: "50", "cpu": "1"}, "limits": {MEMORY: "1024", "memory": "1Gi"}}
    assert resources(pod("p", {"name": "c", "resources": given})) == {
        "requests": {CORE: "50", "cpu": "1", MEMORY: "1024"},
        "limits": {MEMORY: "1024", "memory": "1Gi", CORE: "50"},
    }


def test_unequal_amounts_are_left_for_the_validation() -> None:
    given = {"requests": {CORE: "50"}, "limits": {CORE: "60"}}
    assert mutate(pod("p", {"name": "c", "resources": given}), SETTINGS) == Mutation()


@pytest.mark.parametrize("resource", ["aliyun.com/gpu-mem", "koordinator.sh/gpu-core", "nvidia.com/mig-1g.10gb"])
def test_the_other_vocabularies_are_completed_too_and_otherwise_left_alone(resource: str) -> None:
    raw = pod("p", {"name": "c", "env": [VISIBLE], "resources": {"limits": {resource: "1"}}})
    assert resources(raw)["requests"] == {resource: "1"}
    assert mutate(raw, SETTINGS).warnings == ()


@pytest.mark.parametrize(
    "raw",
    [
        pod("p", {"name": "c"}),
        pod("p", {"name": "c", "env": [VISIBLE], "resources": {"requests": {"cpu": "1"}}}, annotations={ASSUMED: "x"}),
        pod("p", {"name": "c", "resources": None}, init=({"name": "i"},)),
        {"spec": {"containers": None}},
        {},
    ],
)
def test_a_pod_without_gpu_is_not_touched(raw: Any) -> None:
    assert mutate(raw, SETTINGS) == Mutation()


def test_a_reapplied_export_loses_its_old_placement_with_a_warning() -> None:
    raw = share(annotations={ASSUMED: "true", INDEX: "3", "team": "a"})
    assert after(raw)["metadata"]["annotations"] == {"team": "a"}
    assert [w.split(":")[0] for w in mutate(raw, SETTINGS).warnings] == [
        f"metadata.annotations[{ASSUMED}]",
        f"metadata.annotations[{INDEX}]",
    ]


def test_gpu_containers_lose_their_own_visible_devices_with_a_warning() -> None:
    env = [{"name": "A", "value": "1"}, VISIBLE, {"name": "B", "value": "2"}, VISIBLE]
    gpu, other = container("c", 50, 1024, env=env), {"name": "o", "env": [VISIBLE]}
    raw = pod("p", gpu, other, init=(container("i", 50, 1024, env=[VISIBLE]),))
    spec = after(raw)["spec"]
    assert [e["name"] for e in spec["containers"][0]["env"]] == ["A", "B"]
    assert spec["containers"][1]["env"] == [VISIBLE]
    assert spec["initContainers"][0]["env"] == []
    assert len(mutate(raw, SETTINGS).warnings) == 2
