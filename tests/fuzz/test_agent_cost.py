"""The node agent's time grows no faster than the size of its input, even for hostile input."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from deviceplugin.kubelet.checkpoint import read_checkpoint
from deviceplugin.pods.gpu_pod import read_gpu_pod
from mgpu.dialects.gpushare import UNHEALTHY_CARD_LISTS
from mgpu.model.device_checkpoints import CHECKPOINTS, read_entries
from mgpu.model.device_object import read_device
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_node
from mgpu.settings import load_settings
from proto import deviceplugin_pb2 as api
from tests import builders as b
from tests.fuzz import hostile
from tests.fuzz.cost import LARGE, cost, least

pytestmark = pytest.mark.fuzz
SETTINGS = load_settings()
_GROWTH = 3
"""Times the cost of an input of half the size."""
_AGAIN = 5
"""On a busy machine the least of three calls may still be far above what a call costs."""


def told(call: Callable[[], object]) -> object:
    """What is read, or why nothing is."""
    try:
        return call()
    except BadObject as error:
        return str(error)


def grows_in_proportion(call: Callable[[int], Callable[[], object]]) -> None:
    halves, whole = call(LARGE // 2), call(LARGE)
    small, large = cost(halves), cost(whole, repeats=1)
    for _ in range(_AGAIN):
        if large.seconds <= _GROWTH * small.seconds + 0.001:
            break
        small, large = least(small, cost(halves)), least(large, cost(whole))
    assert large.seconds <= _GROWTH * small.seconds + 0.001, f"{large.seconds / small.seconds:.1f} times as long"
    assert large.peak <= _GROWTH * small.peak + 65_536, f"{large.peak / small.peak:.1f} times the memory"


@pytest.mark.parametrize("name", [name for name in hostile.PODS if name not in hostile.OF_ONE_SIZE])
def test_pod_on_the_node_is_read_in_time_proportional_to_its_size(name: str) -> None:
    def call(size: int) -> Callable[[], object]:
        raw = hostile.PODS[name](size)
        raw["spec"]["nodeName"] = "n1"
        return lambda: read_gpu_pod(raw, SETTINGS)

    grows_in_proportion(call)


RECORDS: dict[str, Callable[[int], dict[str, str]]] = {
    "cards of a container": lambda size: {"vke.volcengine.com/gpu-index-container-c": "1," * (size // 2)},
    "cards of containers": lambda size: hostile.keyed(
        size, lambda i: (f"vke.volcengine.com/gpu-index-container-c{i}", "0")
    ),
    "devices": lambda size: {
        "scheduling.koordinator.sh/device-allocated": _json(
            {"gpu": hostile.filled(size, lambda i: {"minor": i, "resources": {}})}
        )
    },
    "devices of containers": lambda size: {
        "scheduling.koordinator.sh/device-allocated": _json({"gpu": [{"minor": 0, "resources": {}}]}),
        "mgpu.io/container-devices": _json(hostile.keyed(size, lambda i: (f"c{i}", {"gpu": [0]}))),
    },
    "slices": lambda size: {
        "mgpu.io/slices-given": _json({"c": {"mig-1g.10gb": hostile.filled(size, lambda _: "0:4")}})
    },
    "allocations": lambda size: {
        "scheduler.framework.gpushare.allocation": _json(hostile.keyed(size, lambda i: (f"c{i}", {"0": 1})))
    },
    "lists in lists": lambda size: {"scheduler.framework.gpushare.allocation": "[" * size},
}
ASKS: dict[str, dict[str, Any]] = {
    "mgpu": b.share("p"),
    "koordinator": b.pod("p", hostile.asking("c", "koordinator.sh/gpu-memory-ratio", "50")),
    "gpushare": b.pod("p", hostile.asking("c", "aliyun.com/gpu-mem", "1")),
    "slices": b.pod("p", hostile.asking("c", "nvidia.com/mig-1g.10gb", "1")),
}


@pytest.mark.parametrize("gpu_request", ASKS)
@pytest.mark.parametrize("record", RECORDS)
def test_record_of_a_pod_is_read_in_time_proportional_to_its_size(record: str, gpu_request: str) -> None:
    def call(size: int) -> Callable[[], object]:
        raw = {**ASKS[gpu_request], "metadata": {**ASKS[gpu_request]["metadata"], "annotations": RECORDS[record](size)}}
        raw["spec"] = {**raw["spec"], "nodeName": "n1"}
        return lambda: read_gpu_pod(raw, SETTINGS)

    grows_in_proportion(call)


OBJECTS: dict[str, tuple[Callable[[Any], object], Callable[[int], Any]]] = {
    "a Device": (
        read_device,
        lambda size: {"spec": {"devices": hostile.filled(size, lambda i: {"type": "rdma", "minor": i})}},
    ),
    "a Device with wrong rows": (read_device, lambda size: {"spec": {"devices": hostile.filled(size, lambda i: i)}}),
    "a Device with resources": (
        read_device,
        lambda size: {
            "spec": {"devices": [{"type": "gpu", "resources": hostile.keyed(size, lambda i: (f"a{i}", "1"))}]}
        },
    ),
    "what pods were given": (
        read_entries,
        lambda size: {"metadata": {"annotations": {CHECKPOINTS: _json(hostile.filled(size, _given))}}},
    ),
    "a ConfigMap": (UNHEALTHY_CARD_LISTS.cards_of, lambda size: {"data": {"gpus": "1," * (size // 2)}}),
    "a ConfigMap of indexes": (
        UNHEALTHY_CARD_LISTS.cards_of,
        lambda size: {"data": {"gpus": ",".join(["1"] * (size // 2))}},
    ),
    "a Node": (read_node, lambda size: b.node(**hostile.keyed(size, lambda i: (f"mgpu.io/{i}", "")))),
}


def _given(i: int) -> dict[str, Any]:
    return {"podUID": f"u{i}", "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ["GPU-1"]}


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


@pytest.mark.parametrize("name", OBJECTS)
def test_object_is_read_in_time_proportional_to_its_size(name: str) -> None:
    read, make = OBJECTS[name]

    def call(size: int) -> Callable[[], object]:
        raw = make(size)
        return lambda: told(lambda: read(raw))

    grows_in_proportion(call)


def test_checkpoint_is_read_in_time_proportional_to_its_size(tmp_path: Path) -> None:
    answer = base64.b64encode(api.ContainerAllocateResponse(envs={"A": "1"}).SerializeToString()).decode()

    def row(i: int) -> dict[str, Any]:
        ids = {"-1": [f"{i}-{j}" for j in range(50)]}
        return {"PodUID": f"u{i}", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": ids, "AllocResp": answer}

    def call(size: int) -> Callable[[], object]:
        file = tmp_path / str(size)
        file.write_bytes(
            orjson.dumps({"Data": {"PodDeviceEntries": hostile.filled(size, row), "RegisteredDevices": {}}})
        )
        return lambda: read_checkpoint(file, "r")

    grows_in_proportion(call)
