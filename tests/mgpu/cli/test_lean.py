"""What is left out of Pods as they are read makes no difference to anybody."""

from dataclasses import MISSING, fields
from typing import Any

import orjson
import pytest

from mgpu.cli.lean import decode_pods
from mgpu.dialects import mtgpu
from mgpu.model.pods import Container, Pod, Stage, read_pod
from tests.builders import GIB, owned

RESOURCES = {"requests": {"cpu": "2", "nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
CONTAINER = {
    "name": "c",
    "image": "x",
    "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-n1-0"}],
    "resources": RESOURCES,
    "livenessProbe": {"httpGet": {"port": 80}},
}
POD: dict[str, Any] = {
    "metadata": {
        "namespace": "team",
        "name": "p",
        "uid": "u",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "deletionTimestamp": "2026-01-02T00:00:00Z",
        "labels": {"a": "b"},
        "annotations": {mtgpu.GPUID: "abcde", mtgpu.REQUEST: "0.4", mtgpu.LIMIT: "0.5", mtgpu.MEMORY: str(GIB)},
        "ownerReferences": [owned("notebook")],
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
    },
    "spec": {
        "initContainers": [{**CONTAINER, "name": "side", "restartPolicy": "Always"}, {**CONTAINER, "name": "init"}],
        "containers": [CONTAINER],
        "nodeName": "n1",
        "schedulerName": "other",
        "priority": 5,
        "overhead": {"memory": "1Gi"},
        "resources": {"requests": {"memory": "8Gi"}},
        "volumes": [{"name": "v"}],
    },
    "status": {
        "phase": "Unknown",
        "nominatedNodeName": "n1",
        "startTime": "2026-01-01T00:00:01Z",
        "containerStatuses": [{"name": "c", "containerID": "containerd://1"}],
        "initContainerStatuses": [],
        "conditions": [{"type": "Ready", "status": "False"}],
    },
}


def decoded(*pods: object) -> list[dict[str, Any]]:
    page = decode_pods(orjson.dumps({"metadata": {"resourceVersion": "1", "continue": "x"}, "items": pods}))
    assert page["metadata"] == {"resourceVersion": "1", "continue": "x"}
    return list(page["items"])


def test_every_reader_finds_what_it_looks_for() -> None:
    (lean,) = decoded(POD)
    whole = read_pod(POD)
    unsaid = [
        f.name for kind, one in ((Pod, whole), (Container, whole.containers[0])) for f in fields(kind) if same(one, f)
    ]
    assert unsaid == ["position"]  # every other field is set here, so none can be left out unseen
    assert read_pod(lean) == whole
    assert [c.stage for c in read_pod(lean).containers] == [Stage.SIDECAR, Stage.INIT, Stage.APP]
    assert lean["metadata"]["resourceVersion"] == "7"
    held = mtgpu.holding_of_pod(read_pod(lean), lean)
    assert held is not None
    assert held == mtgpu.holding_of_pod(whole, POD)


def same(one: object, field: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(one, field.name) == default)


def test_what_nobody_looks_at_is_gone() -> None:
    (lean,) = decoded(POD)
    assert "managedFields" not in lean["metadata"]
    assert "volumes" not in lean["spec"]
    assert "conditions" not in lean["status"]
    assert sorted(lean["spec"]["containers"][0]) == ["env", "name", "resources"]


@pytest.mark.parametrize("spec", [{"containers": None}, {"containers": "x"}, {"initContainers": [1]}, None])
def test_an_odd_object_comes_whole(spec: object) -> None:
    odd = {**POD, "spec": spec}
    assert decoded(POD, odd) == [POD, odd]


def test_what_is_no_json_is_no_answer() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        decode_pods(b'{"items": [')
