"""Koordinator pods through /mutate and /validate (docs/design/koordinator.md, "Resources")."""

from typing import Any

import pytest

from mgpu.settings import load_settings
from tests.builders import CORE, container, pod
from tests.mgpu.serving.reviews import patch_of, patched, review
from webhook.admission import make_app
from webhook.pod_rules import unknown_constraints, validate_update

SETTINGS = load_settings()
GPU, GPU_CORE, MEMORY, RATIO, SHARED, RDMA, FPGA = (
    f"koordinator.sh/{name}"
    for name in ("gpu", "gpu-core", "gpu-memory", "gpu-memory-ratio", "gpu.shared", "rdma", "fpga")
)
NVIDIA = "nvidia.com/gpu"
ALLOCATED, PER_CONTAINER = "scheduling.koordinator.sh/device-allocated", "mgpu.io/container-devices"


def asking(name: str = "c", /, **kinds: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "image": "cuda", "resources": kinds}


def verdict(*containers: dict[str, Any], **more: Any) -> list[str]:
    """Return the problems for which the mutated pod is denied; [] if it is admitted."""
    raw, client = pod("p", *containers, **more), make_app(SETTINGS).test_client()
    mutated: Any = client.post("/mutate", json=review(raw)).json
    answer: Any = client.post("/validate", json=review(patched(raw, patch_of(mutated)))).json
    response = answer["response"]
    if response["allowed"]:
        return []
    return [f"{cause['field']}: {cause['message']}" for cause in response["status"]["details"]["causes"]]


@pytest.mark.parametrize(
    "requests",
    [
        {NVIDIA: "2"},
        {GPU: "50"},
        {GPU_CORE: "50", RATIO: "60"},
        {GPU_CORE: "60", MEMORY: "4Gi"},
        {MEMORY: "4Gi"},
        {SHARED: "2", RATIO: "200"},
        {RDMA: "100"},
        {GPU: "50", RDMA: "50", FPGA: "200", "koordinator.sh/npu": "100"},
    ],
    ids=str,
)
def test_koordinator_request_without_limits_is_admitted(requests: dict[str, str]) -> None:
    assert verdict(asking(requests={**requests, "cpu": "4"})) == []


def test_containers_with_different_forms_of_request_are_admitted() -> None:
    assert verdict(asking("a", limits={NVIDIA: "1"}), asking("b", limits={GPU: "50"}), asking("c")) == []


@pytest.mark.parametrize(
    "amounts", [{}, {CORE: "50", "vke.volcengine.com/mgpu-memory": "512"}, {"aliyun.com/gpu-mem": "4"}, {GPU: "50"}]
)
def test_zero_whole_cards_are_no_request_in_any_vocabulary(amounts: dict[str, str]) -> None:
    """A LimitRange sets such a zero in each container of its namespace; Ray sets it in its head pods."""
    none = {NVIDIA: "0"}
    assert verdict(asking("a", requests=amounts | none, limits=amounts | none), asking("b", limits=none)) == []


@pytest.mark.parametrize(("first", "other"), [(CORE, GPU), (NVIDIA, "aliyun.com/gpu-mem"), (CORE, RDMA)])
def test_pod_with_two_vocabularies_is_denied(first: str, other: str) -> None:
    found = verdict(asking("a", limits={first: "100"}), asking("b", limits={other: "100"}))
    mixing = [text.split(": ")[0] for text in found if "a pod uses one vocabulary" in text]
    assert mixing == [f"spec.containers[1].resources.requests[{other}]"]  # the resource as in the user's pod


def test_koordinator_pod_is_denied_with_all_problems() -> None:
    found = verdict(
        asking("a", requests={GPU: "150"}, limits={GPU: "150"}),
        asking("b", requests={GPU_CORE: "50"}),
        asking("d", requests={SHARED: "2", GPU_CORE: "75", RATIO: "300", RDMA: "0"}),
        asking("e", requests={GPU: "50"}, limits={GPU: "60"}),
        asking("f", limits={NVIDIA: "1", GPU: "100"}),
    )
    at = "spec.containers[{}].resources.{}[{}]: "
    starts = [
        at.format(0, "requests", GPU) + "above 100 must be a multiple of 100 (whole devices), not 150",
        at.format(1, "requests", GPU_CORE) + "cannot be requested alone; a container can request one of ",
        at.format(2, "requests", GPU_CORE) + "must be divisible by the number of cards: 75 over 2 cards",
        at.format(2, "requests", RATIO) + "must be at most 100 per card: 300 over 2 cards",
        at.format(2, "requests", RDMA) + "must be greater than 0, not 0",
        at.format(3, "limits", GPU) + "must equal the request, which is 50, not 60",
        at.format(4, "requests", NVIDIA) + f"cannot be combined with {GPU}; a container can request one of ",
    ]
    assert len(found) == len(starts)
    assert all(text.startswith(start) for text, start in zip(found, starts, strict=True))


def test_both_annotations_of_the_koordinator_record_are_reserved() -> None:
    raw = pod("p", container("c", 50, 512))
    old = pod("p", asking(limits={GPU: "50"}))
    for key in (ALLOCATED, PER_CONTAINER):
        new = {**old, "metadata": {**old["metadata"], "annotations": {key: "{}"}}}
        assert [p.field for p in validate_update(new, old, "alice", SETTINGS)] == [f"metadata.annotations[{key}]"]
        assert unknown_constraints(new, old) == []
        written = {**raw, "metadata": {**raw["metadata"], "annotations": {key: "{}"}}}
        answer: Any = make_app(SETTINGS).test_client().post("/mutate", json=review(written)).json
        assert key not in patched(written, patch_of(answer))["metadata"]["annotations"]
