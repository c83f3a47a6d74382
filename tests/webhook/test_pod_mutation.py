"""Changes that admission makes to a new pod."""

from typing import Any

import pytest

from mgpu.settings import Settings, load_settings
from tests.builders import CORE, MEMORY, container, pod, share
from tests.mgpu.serving.reviews import patched
from webhook.pod_mutation import Mutation, mutate
from webhook.pod_rules import validate_create

SETTINGS = load_settings()
VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
INDEX = "vke.volcengine.com/gpu-index-container-c"
ASSUMED = "vke.volcengine.com/assumed"


def after(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the pod after mutation. A second mutation must change nothing."""
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
def test_missing_requests_or_limits_are_added(given: Any) -> None:
    got = resources(pod("p", {"name": "c", "resources": given}))
    assert got == {"requests": {CORE: "50"}, "limits": {CORE: "50"}}


def test_other_resources_are_not_changed() -> None:
    given = {"requests": {CORE: "50", "cpu": "1"}, "limits": {MEMORY: "1024", "memory": "1Gi"}}
    assert resources(pod("p", {"name": "c", "resources": given})) == {
        "requests": {CORE: "50", "cpu": "1", MEMORY: "1024"},
        "limits": {MEMORY: "1024", "memory": "1Gi", CORE: "50"},
    }


def test_unequal_amounts_are_not_changed() -> None:
    given = {"requests": {CORE: "50"}, "limits": {CORE: "60"}}
    assert mutate(pod("p", {"name": "c", "resources": given}), SETTINGS) == Mutation()


@pytest.mark.parametrize("resource", ["aliyun.com/gpu-mem", "koordinator.sh/gpu", "nvidia.com/mig-1g.10gb"])
def test_pod_of_a_disabled_vocabulary_is_only_completed(resource: str) -> None:
    off = load_settings(
        "{dialects: {gpushare: {enabled: false}, koordinator: {enabled: false}, slices: {enabled: false}},"
        " webhook: {schedulerName: ours}}"
    )
    raw = pod("p", {"name": "c", "env": [VISIBLE], "resources": {"limits": {resource: "1"}}})
    added = {"op": "add", "path": "/spec/containers/0/resources/requests", "value": {resource: "1"}}
    assert mutate(raw, off) == Mutation((added,))


def test_exported_pod_of_a_disabled_vocabulary_keeps_its_node() -> None:
    """With its node and its record, the pod seems to have its cards."""
    amounts = {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
    key = "scheduling.koordinator.sh/device-allocated"
    record = (
        '{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"100","koordinator.sh/gpu-memory-ratio":"100"}}]}'
    )
    raw = pod("p", {"name": "c", "env": [VISIBLE], "resources": amounts}, node="n1", annotations={key: record})
    (removed,) = mutate(raw, load_settings("dialects: {koordinator: {enabled: false}}")).patch
    assert removed["path"] == "/metadata/annotations/scheduling.koordinator.sh~1device-allocated"


@pytest.mark.parametrize(
    "raw",
    [
        pod("p", {"name": "c"}),
        pod("p", {"name": "c", "env": [VISIBLE], "resources": {"requests": {"cpu": "1"}}}, annotations={"team": "x"}),
        pod("p", {"name": "c", "resources": None}, init=({"name": "i"},)),
        pod("p", {"name": "c", "env": [VISIBLE], "resources": {"limits": {"nvidia.com/gpu": "0"}}}),
        {"spec": {"containers": None}},
        {},
    ],
)
def test_pod_without_gpu_is_not_changed(raw: Any) -> None:
    assert mutate(raw, SETTINGS) == Mutation()


def test_exported_pod_loses_its_placement_with_a_warning() -> None:
    raw = share(annotations={ASSUMED: "true", INDEX: "3", "team": "a"})
    assert after(raw)["metadata"]["annotations"] == {"team": "a"}
    assert [w.split(":")[0] for w in mutate(raw, SETTINGS).warnings] == [
        f"metadata.annotations[{ASSUMED}]",
        f"metadata.annotations[{INDEX}]",
    ]


RECORDS = [
    *("vke.volcengine.com/assumed", INDEX, "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_ASSIGNED"),
    *("scheduler.framework.gpushare.allocation", "scheduling.koordinator.sh/device-allocated"),
    *("mgpu.io/container-devices", "mgpu.io/slices-given", "mgpu.io/seal", "mgpu.io/resized", "mgpu.io/resize-applied"),
]
ALL_OFF = load_settings(flags={f"dialects.{name}.enabled": "false" for name, _ in load_settings().dialects})
SCHEDULER = "system:serviceaccount:mgpu-system:mgpu-scheduler"


@pytest.mark.parametrize("settings", [SETTINGS, ALL_OFF], ids=["on", "off"])
@pytest.mark.parametrize("key", RECORDS)
def test_new_pod_with_a_record_of_any_vocabulary_loses_it(key: str, settings: Settings) -> None:
    plain = pod("p", {"name": "c"}, annotations={key: "x", "team": "a"})
    mutation = mutate(plain, settings, "alice")
    assert patched(plain, mutation.patch)["metadata"]["annotations"] == {"team": "a"}
    assert mutation.warnings == (
        f"metadata.annotations[{key}]: removed; it records a placement, which only mgpu decides",
    )
    assert mutate(plain, settings, SCHEDULER) == Mutation()


def test_new_pod_with_a_status_is_read_by_its_spec() -> None:
    """The API server resets `status` only after mutating admission."""
    rows = [{"containerName": "c", "requestName": "r", "resourceName": name} for name in (CORE, MEMORY)]
    raw = share(annotations={INDEX: "3"}) | {"status": {"extendedResourceClaimStatus": {"requestMappings": rows}}}
    assert mutate(raw, SETTINGS).patch == (
        {"op": "remove", "path": f"/metadata/annotations/{INDEX.replace('/', '~1')}"},
    )
    bad = pod("p", container("c", 120)) | {"status": raw["status"]}
    assert [problem.field for problem in validate_create(bad, SETTINGS)] == [
        f"spec.containers[0].resources.requests[{CORE}]"
    ]


def test_visible_devices_of_a_gpu_container_are_removed_with_a_warning() -> None:
    env = [{"name": "A", "value": "1"}, VISIBLE, {"name": "B", "value": "2"}, VISIBLE]
    gpu, other = container("c", 50, 1024, env=env), {"name": "o", "env": [VISIBLE]}
    raw = pod("p", gpu, other, init=(container("i", 50, 1024, env=[VISIBLE]),))
    spec = after(raw)["spec"]
    assert [e["name"] for e in spec["containers"][0]["env"]] == ["A", "B"]
    assert spec["containers"][1]["env"] == [VISIBLE]
    assert spec["initContainers"][0]["env"] == []
    assert len(mutate(raw, SETTINGS).warnings) == 2


def test_visible_devices_of_a_container_without_cards_stay() -> None:
    """The image may set the variable to `all`, which the pod's own variable overrides."""
    void = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    amounts = {"koordinator.sh/rdma": "100"}
    assert (
        mutate(pod("p", {"name": "c", "env": [void], "resources": {"requests": amounts, "limits": amounts}}), SETTINGS)
        == Mutation()
    )


SHARE = "mgpu.io/share"
GPU, GPU_CORE, GPU_MEMORY, RATIO = (f"koordinator.sh/gpu{rest}" for rest in ("", "-core", "-memory", "-memory-ratio"))


def asking(**given: Any) -> dict[str, Any]:
    return pod("p", {"name": "c", "resources": given})


def test_koordinator_shorthand_is_replaced_by_core_and_memory() -> None:
    both = {GPU_CORE: "50", RATIO: "50"}
    for given in (
        {"requests": {GPU: "50"}},
        {"limits": {GPU: "50"}},
        {"requests": {GPU: "50"}, "limits": {GPU: "50"}},
    ):
        assert resources(asking(**given)) == {"requests": both, "limits": both}
    assert resources(asking(requests={GPU: "200", "cpu": "4"})) == {
        "requests": {"cpu": "4", GPU_CORE: "200", RATIO: "200"},
        "limits": {GPU_CORE: "200", RATIO: "200"},
    }
    none = {"nvidia.com/gpu": "0"}
    assert resources(asking(requests={GPU: "50"} | none)) == {"requests": both | none, "limits": both | none}


@pytest.mark.parametrize(
    "given",
    [
        {"requests": {GPU: "50"}, "limits": {GPU: "60"}},
        {"requests": {GPU: "50", RATIO: "1"}, "limits": {GPU: "50", RATIO: "1"}},
        {"requests": {GPU: "150"}, "limits": {GPU: "150"}},
        {"requests": {GPU: "x"}, "limits": {GPU: "x"}},
        {"requests": {GPU: "50", CORE: "50"}, "limits": {GPU: "50", CORE: "50"}},
    ],
    ids=["unequal", "beside another", "no whole cards", "no number", "vocabularies mixed"],
)
def test_invalid_shorthand_is_not_changed(given: Any) -> None:
    got = resources(asking(**given))
    assert [got[kind][GPU] for kind in given] == [given[kind][GPU] for kind in given]
    assert validate_create(asking(**given), SETTINGS)


def test_whole_cards_keep_their_resource_name() -> None:
    assert resources(asking(requests={"nvidia.com/gpu": "2"})) == {
        "requests": {"nvidia.com/gpu": "2"},
        "limits": {"nvidia.com/gpu": "2"},
    }


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        ({GPU_MEMORY: "4Gi"}, ""),
        ({GPU_MEMORY: "4Gi", "koordinator.sh/gpu.shared": "2"}, ""),
        ({GPU_MEMORY: "4Gi", "koordinator.sh/rdma": "100"}, ""),
        ({"aliyun.com/gpu-mem": "4096"}, "dialects: {gpushare: {memoryUnit: MiB}}"),
        ({GPU_MEMORY: "4Gi", "nvidia.com/gpu": "0"}, ""),
    ],
)
def test_request_without_device_ids_gets_a_share_resource(amounts: dict[str, str], text: str) -> None:
    raw, settings = asking(requests=amounts), load_settings(text)
    once = patched(raw, mutate(raw, settings).patch)
    both = {**amounts, SHARE: "1"}
    assert once["spec"]["containers"][0]["resources"] == {"requests": both, "limits": both}
    assert mutate(once, settings) == Mutation()
    assert validate_create(once, settings) == []


@pytest.mark.parametrize(
    "amounts",
    [
        {GPU_MEMORY: "4Gi", GPU_CORE: "50"},
        {RATIO: "50"},
        {"nvidia.com/gpu": "1"},
        {"koordinator.sh/rdma": "100"},
        {"aliyun.com/gpu-mem": "4"},
        {CORE: "50", MEMORY: "512"},
    ],
)
def test_request_with_device_ids_loses_its_share_resource(amounts: dict[str, str]) -> None:
    assert SHARE not in resources(asking(requests=amounts))["limits"]
    given = asking(requests={**amounts, SHARE: "7"}, limits=amounts)
    assert resources(given) == {"requests": amounts, "limits": amounts}
    assert mutate(given, SETTINGS).warnings == (
        f"spec.containers[0].resources[{SHARE}]: removed; mgpu sets it where it is needed",
    )


def test_wrong_amount_of_the_share_resource_becomes_one() -> None:
    given = asking(requests={GPU_MEMORY: "4Gi", SHARE: "7"})
    assert resources(given)["limits"] == resources(given)["requests"] == {GPU_MEMORY: "4Gi", SHARE: "1"}


@pytest.mark.parametrize(
    ("before", "warned"), [(None, False), ("default-scheduler", False), ("volcano", True), ("ours", None)]
)
def test_gpu_pod_gets_the_scheduler_name_of_the_settings(before: str | None, warned: bool | None) -> None:
    settings = load_settings("webhook: {schedulerName: ours}")
    container_only = asking(requests={"cpu": "1"})
    gpu = asking(requests={"nvidia.com/gpu": "1"}, limits={"nvidia.com/gpu": "1"})
    for raw in (container_only, gpu):
        if before:
            raw["spec"]["schedulerName"] = before
    assert mutate(container_only, settings) == Mutation()
    changed = mutate(gpu, settings)
    expected = [] if warned is None else [{"op": "add", "path": "/spec/schedulerName", "value": "ours"}]
    assert (list(changed.patch), bool(changed.warnings)) == (expected, bool(warned))
    assert mutate(gpu, SETTINGS) == Mutation()
    assert mutate({**gpu, "spec": {**gpu["spec"], "nodeName": "n1"}}, settings) == Mutation()
