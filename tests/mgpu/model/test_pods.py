"""Pods and nodes are read once; whatever is of a wrong type is named by its path and never crashes the reader."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.errors import BadObject
from mgpu.model.pods import Stage, read_node, read_pod
from mgpu.model.record_seals import SEAL
from tests import builders
from tests.builders import CORE, container, pod


def paths(error: pytest.ExceptionInfo[BadObject]) -> list[str]:
    return [problem.field for problem in error.value.problems]


def test_containers_stand_in_start_order_with_their_paths() -> None:
    read = read_pod(pod("p", container("app"), init=(container("side", restartPolicy="Always"), container("prepare"))))
    assert [(c.name, c.stage, c.path, c.position) for c in read.containers] == [
        ("side", Stage.SIDECAR, "spec.initContainers[0]", 0),
        ("prepare", Stage.INIT, "spec.initContainers[1]", 1),
        ("app", Stage.APP, "spec.containers[0]", 0),
    ]
    assert [c.name for c in read.app_containers] == ["app"]


def test_a_resource_is_asked_by_requests_else_by_limits() -> None:
    both = {"resources": {"requests": {"a": "1"}, "limits": {"a": "2", "b": "3"}}}
    read = read_pod(pod("p", {"name": "c", **both})).containers[0]
    assert read.requested("a") == ("1", "spec.containers[0].resources.requests[a]")
    assert read.requested("b") == ("3", "spec.containers[0].resources.limits[b]")
    assert read.requested("c") is None


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"])
def test_zero_of_nvidias_resources_is_no_ask(resource: str) -> None:
    amounts = {"requests": {resource: "0"}, "limits": {resource: 0}}
    assert read_pod(pod("p", {"name": "c", "resources": amounts})).containers[0].requested(resource) is None


def test_bare_numbers_are_quantities() -> None:
    read = read_pod(pod("p", {"name": "c", "resources": {"limits": {CORE: 50}}}))
    assert read.containers[0].limits == {CORE: "50"}


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ([], "pod"),
        ("text", "pod"),
        ({"metadata": 5}, "metadata"),
        ({"metadata": {"name": 5}}, "metadata.name"),
        ({"metadata": {"annotations": {"a": 1}}}, "metadata.annotations[a]"),
        ({"metadata": {"labels": ["a"]}}, "metadata.labels"),
        ({"spec": {"containers": {}}}, "spec.containers"),
        ({"spec": {"containers": ["c"]}}, "spec.containers[0]"),
        ({"spec": {"containers": [{"resources": 1}]}}, "spec.containers[0].resources"),
        ({"spec": {"containers": [{"resources": {"limits": {"a": True}}}]}}, "spec.containers[0].resources.limits[a]"),
        (
            {"spec": {"containers": [{"resources": {"requests": {"a": {}}}}]}},
            "spec.containers[0].resources.requests[a]",
        ),
        ({"spec": {"containers": [{"env": {}}]}}, "spec.containers[0].env"),
        ({"spec": {"initContainers": [{"env": [1]}]}}, "spec.initContainers[0].env[0]"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}, "spec.containers[1].name"),
        ({"spec": {"nodeName": 1}}, "spec.nodeName"),
        ({"spec": {"priority": "high"}}, "spec.priority"),
        ({"status": []}, "status"),
    ],
)
def test_a_wrong_type_is_named(raw: object, path: str) -> None:
    with pytest.raises(BadObject) as error:
        read_pod(raw)
    assert paths(error) == [path]


def test_all_wrong_types_are_named_at_once() -> None:
    with pytest.raises(BadObject) as error:
        read_pod({"metadata": {"name": 1, "uid": 2}, "spec": {"containers": 3}})
    assert paths(error) == ["spec.containers", "metadata.name", "metadata.uid"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_keys = st.sampled_from(["name", "resources", "requests", "limits", "env", "state", "running", "containerID"])
_odd = st.recursive(_json, lambda inner: st.dictionaries(_keys, inner) | st.lists(inner, max_size=2), max_leaves=8)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("metadata", "spec", "status"), _odd)),
    st.lists(_odd, max_size=2),
    st.lists(_odd, max_size=2),
)
def test_property_any_json_is_a_pod_or_a_bad_object(
    raw: dict[str, Any], containers: list[Any], rows: list[Any]
) -> None:
    for whole in (raw, {"spec": {"containers": containers}, "status": {"containerStatuses": rows}}):
        with suppress(BadObject):
            assert read_pod(whole).namespace


@pytest.mark.parametrize(
    ("status", "started"),
    [
        ({}, False),
        ({"phase": "Running"}, True),
        ({"containerStatuses": [{"name": "c", "state": {"waiting": {}}}]}, False),
        ({"containerStatuses": [{"name": "c", "state": {"running": {}}}]}, True),
        ({"containerStatuses": [{"name": "c", "lastState": {"terminated": {}}}]}, True),
        ({"initContainerStatuses": [{"name": "i", "containerID": "containerd://1"}]}, True),
        ({"containerStatuses": [{"name": "of-no-container", "state": {"running": {}}}]}, False),
        ({"containerStatuses": [{"state": 5}, None, "x"], "initContainerStatuses": 7}, False),
    ],
)
def test_a_pod_has_started_once_any_container_ran(status: dict[str, Any], started: bool) -> None:
    raw = pod("p", {"name": "c"}, init=({"name": "i"},))
    assert read_pod(raw | {"status": status}).started is started


def test_what_a_claim_serves_a_container_asks_of_nobody_here() -> None:
    amounts = {"nvidia.com/gpu": "1", "cpu": "2"}
    one, other = (container(name) | {"resources": {"requests": amounts, "limits": amounts}} for name in "ab")
    raw = pod("p", one, other)
    row = {"containerName": "a", "resourceName": "nvidia.com/gpu", "requestName": "container-0-request-0"}
    raw["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "p-x", "requestMappings": [row]}
    read = read_pod(raw)
    assert [c.requests == c.limits for c in read.containers] == [True, True]
    assert [sorted(c.requests) for c in read.containers] == [["cpu"], ["cpu", "nvidia.com/gpu"]]
    assert read.cpu_memory.cpu == 4000


def test_a_claim_in_the_status_of_a_pod_with_a_seal_takes_nothing_of_its_request() -> None:
    """A stolen token of a scheduler may write the status of a pod that runs, and so its cards would be free."""
    amounts = {"nvidia.com/gpu": "1"}
    raw = pod("p", container("a") | {"resources": {"limits": amounts}}, annotations={SEAL: "v1"}, node="n1")
    row = {"containerName": "a", "resourceName": "nvidia.com/gpu", "requestName": "r"}
    raw["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "x", "requestMappings": [row]}
    assert read_pod(raw).containers[0].limits == amounts
    del raw["spec"]["nodeName"]
    assert read_pod(raw).containers[0].limits == {}


def test_only_ended_pods_hold_nothing() -> None:
    ended = {phase: read_pod(pod("p", phase=phase)).ended for phase in ("Pending", "Running", "Succeeded", "Failed")}
    assert ended == {"Pending": False, "Running": False, "Succeeded": True, "Failed": True}
    terminating = pod("p", phase="Running")
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not read_pod(terminating).ended
    assert read_pod(terminating).deleting


def test_nodes_are_read_the_same_way() -> None:
    assert read_node(builders.node("n1")).capacity["cpu"] == "64"
    with pytest.raises(BadObject) as error:
        read_node({"metadata": {"name": "n", "labels": {"a": 1}}, "status": {"capacity": {"cpu": []}}})
    assert paths(error) == ["metadata.labels[a]", "status.capacity[cpu]"]
