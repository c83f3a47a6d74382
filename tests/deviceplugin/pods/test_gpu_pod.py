"""Reading one pod of the node."""

import pickle
from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import LimitedPod, read_gpu_pod, read_limited
from mgpu.dialects import mtgpu
from mgpu.settings import load_settings
from tests.builders import CORE, MEMORY, container, pod, share
from tests.deviceplugin.mtgpu import GIB, occupy_pod, pod_of
from tests.deviceplugin.records import read

SETTINGS = load_settings()
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
CARD = "GPU-n1-1"


def test_pod_without_gpu_is_ignored() -> None:
    assert read_gpu_pod(pod("p", container("c")), SETTINGS) is None


def test_pod_with_fields_of_a_wrong_type_is_ignored() -> None:
    assert read_gpu_pod({"metadata": {"uid": "u"}, "spec": []}, SETTINGS) is None


def test_pod_with_a_valid_or_invalid_record_is_decided() -> None:
    assert not read(share()).is_decided
    assert read(share(annotations=RECORD)).is_decided
    garbage = read(share(annotations={**RECORD, "vke.volcengine.com/gpu-index-container-c": "x"}))
    assert garbage.is_decided
    assert "'x' is neither a card index nor a UUID" in str(garbage.problem)
    assert "must be at least 256" in str(read(pod("p", container("c", 50))).problem)


def test_containers_are_in_the_order_in_which_the_kubelet_allocates() -> None:
    gpu_pod = read(pod("p", container("a", 10, 512), container("b"), init=(container("i", 30, 512),)))
    assert [(c.name, amount) for c, amount in gpu_pod.containers_requesting(CORE)] == [("i", 30), ("a", 10)]


def test_pod_holds_its_requests_at_the_busiest_moment() -> None:
    sidecar = container("s", 10, 500, restartPolicy="Always")
    gpu_pod = read(pod("p", container("a", 10, 300), container("b", 10, 400), init=(sidecar, container("i", 10, 900))))
    assert gpu_pod.held[MEMORY] == 1400


def test_started_and_completed_containers_are_read_from_the_status() -> None:
    raw = pod("p", container("c", 10, 512), container("plain"), init=(container("i", 10, 512), container("j", 10, 512)))
    ended = [{"name": n, "state": {"terminated": {"exitCode": code}}} for n, code in (("i", 0), ("j", 1))]
    waiting = [
        {"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}},
        {"name": "plain", "containerID": "x"},
    ]
    gpu_pod = read({**raw, "status": {"initContainerStatuses": ended, "containerStatuses": waiting}})
    assert gpu_pod.started_containers == {"i", "j"}
    assert gpu_pod.completed_init_containers == {"i"}
    assert read(raw).started_containers == set()


@pytest.mark.parametrize("ran", [True, False])
def test_ended_pod_takes_a_few_hundred_bytes(*, ran: bool) -> None:
    """Quotas do not count such pods, and a cluster keeps 12,500 of them. Each had taken 57 to 141 KiB of an agent."""
    names = [f"c{i}-{'x' * 30}" for i in range(200)]
    record = {"vke.volcengine.com/assumed": "true"} | {
        f"vke.volcengine.com/gpu-index-container-{n}": "1" for n in names
    }
    raw = pod("p", *(container(name, 1, 256) for name in names), annotations=record, node="n1", phase="Failed")
    raw["status"]["containerStatuses"] = [{"name": name, "containerID": "x"} for name in names if ran]
    running = {**raw, "status": {"phase": "Running"}}
    assert len(pickle.dumps(read(running))) > 20_000
    gpu_pod = read(raw)
    assert len(pickle.dumps(gpu_pod)) < 1_000
    assert (gpu_pod.pod.key, gpu_pod.pod.uid, gpu_pod.pod.ended) == ("default/p", "uid-p", True)


def changed(meta: dict[str, Any], **more: Any) -> dict[str, Any]:
    raw = pod_of("p", CARD)
    return {**raw, "metadata": {**raw["metadata"], **meta}, **more}


def test_pod_of_an_mtgpupod_is_read_with_its_card_and_share() -> None:
    assert read_limited(pod_of("p", CARD, "0.125", "0.5")) == LimitedPod("default", "p", "uid-p", CARD, 125, 500, GIB)


def test_added_container_does_not_hide_the_card_of_an_mtgpupod() -> None:
    raw = pod_of("p", CARD)
    raw["spec"]["containers"].insert(0, {"name": "mesh", "image": "m", "env": [{"name": "A", "value": "B"}]})
    found = read_limited(raw)
    assert found is not None
    assert found.card == CARD


@pytest.mark.parametrize(
    "raw",
    [
        changed({"ownerReferences": []}),
        changed({"ownerReferences": [{**pod_of("p", CARD)["metadata"]["ownerReferences"][0], "controller": False}]}),
        changed({"ownerReferences": [{"apiVersion": "v1", "kind": "MtgpuPod", "controller": True}]}),
        changed({"ownerReferences": [{"apiVersion": mtgpu.API_VERSION, "kind": "Other", "controller": True}]}),
        changed({"annotations": {}}),
        changed({"annotations": {**pod_of("p", CARD)["metadata"]["annotations"], mtgpu.REQUEST: "NaN"}}),
        changed({}, spec={"containers": [container("c")]}),
        changed({}, spec={"containers": [{"name": "c", "env": [{"name": mtgpu.VISIBLE}]}]}),
        occupy_pod(),
        share(),
    ],
    ids=[
        "no owner",
        "an owner that is no controller",
        "another group",
        "another kind",
        "no annotations",
        "invalid annotations",
        "no card",
        "a card without a value",
        "an occupy pod",
        "a share",
    ],
)
def test_other_pod_has_no_limits(raw: dict[str, Any]) -> None:
    assert read_limited(raw) is None
