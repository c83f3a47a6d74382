"""The expressions of manifests/base/agent-policy.yaml, evaluated by the CEL project's own library.

`tests/e2e/test_agent_policy.py` makes the same writes to a real API server, where there is one.
"""

import copy

import pytest

from deviceplugin.dra.kubelet_retries import RETRY
from deviceplugin.inventory.node_objects import PUBLISHED_ANNOTATION
from deviceplugin.inventory.reporter import (
    agent_patch,
    capacity_patch,
    device_patch,
    labels_patch,
)
from deviceplugin.partitioning import node_status
from deviceplugin.partitioning.node_status import SliceReport
from mgpu import dialects
from mgpu.kube.events import node_reference
from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.device_object import write_device
from mgpu.model.pods import read_node
from mgpu.model.resizing import APPLIED
from mgpu.model.slice_names import MPS, Slice
from mgpu.settings import load_settings
from mgpu.version import AgentReport
from playground.apiserver.patches import merge
from playground.installation import MANIFESTS
from tests import builders as b
from tests.agent_writes import OWN, REFUSED, REFUSED_EVENTS, Write, event
from tests.manifests import policy_evaluation
from tests.manifests.policy_evaluation import Raw, evaluated, policies

AGENT_USER = "system:serviceaccount:mgpu-system:mgpu-deviceplugin"
POLICIES = {
    name.removeprefix("mgpu-deviceplugin-"): spec
    for name, spec in policies(MANIFESTS / "base/agent-policy.yaml").items()
}


def denials(
    kind: str, new: Raw | None, old: Raw | None, *, node: str | None = OWN, user: str = AGENT_USER
) -> tuple[str, ...]:
    """The messages with which the policy for `kind` refuses the change, as the API server would evaluate it."""
    return policy_evaluation.denials(POLICIES[kind], new, old, node=node, user=user)


def existing(target: str, name: str) -> Raw:
    if target == "device":
        return write_device(read_node(b.node(name)), f"uid-{name}", b.cards(2, node=name))
    if target == "pod":
        return b.pod("p", b.container("c", 20, 1024), node=name)
    raw = b.node(name)
    raw["metadata"]["labels"] = {"kubernetes.io/os": "linux"}
    raw["status"] |= {
        "allocatable": {"cpu": "8", "memory": "1Gi"},
        "conditions": [{"type": "Ready", "status": "True"}],
        "addresses": [],
        "nodeInfo": {"kubeletVersion": "v1.36.2"},
        "images": [],
    }
    raw["status"]["capacity"] = {"cpu": "8", "memory": "1Gi"}
    return raw


def patched(target: str, patch: Raw, name: str = OWN) -> tuple[str, ...]:
    kind = target.partition("/")[0] + "s"
    old = existing(kind[:-1], name)
    new = merge(copy.deepcopy(old), patch)
    return denials(kind, new, old)


@pytest.mark.parametrize("write", REFUSED, ids=str)
def test_write_of_a_stolen_token_beyond_the_whitelist_is_refused(write: Write) -> None:
    assert any(write.why in message for message in patched(write.target, write.patch, write.on))


@pytest.mark.parametrize(("raw", "why"), REFUSED_EVENTS)
def test_event_that_another_component_or_node_would_write_is_refused(raw: Raw, why: str) -> None:
    assert any(why in message for message in denials("events", raw, None))


@pytest.mark.parametrize("target", ["node", "pod", "device"])
def test_field_that_the_policies_do_not_know_cannot_be_changed(target: str) -> None:
    """Whatever a later version of Kubernetes adds."""
    for patch in ({"new": "x"}, {"metadata": {"new": "x"}}, {"status": {"new": "x"}}, {"spec": {"new": "x"}}):
        assert patched(target, patch), patch


def test_own_node_patched_as_the_agent_does_is_accepted() -> None:
    settings = load_settings()
    node = existing("node", OWN)
    cards = b.cards(2)
    report = SliceReport((Slice(0, 0, "4gb"),), frozenset({0}), 1, (2, "no"))
    cut = {**node, "metadata": {**node["metadata"], "labels": {"gpu.partitioning": MPS}}}
    patches = [
        capacity_patch(node, cards, settings, lambda _: 0),
        labels_patch(node, cards, "580.1", "mgpu"),
        agent_patch(node, AgentReport("1", True, 2, "mgpu")),
        {"metadata": {"annotations": node_status.changed_annotations(cut, report)}},
    ]
    for patch in patches:
        assert patch
        assert patched("node/status", patch) == ()
    published = merge(copy.deepcopy(node), patches[0])
    back = capacity_patch(published, (), load_settings("dialects: {gpushare: {enabled: false}}"), lambda _: 0)
    assert back
    assert denials("nodes", merge(copy.deepcopy(published), back), published) == ()
    assert PUBLISHED_ANNOTATION in published["metadata"]["annotations"]


def test_own_device_written_as_the_agent_does_is_accepted() -> None:
    wanted = existing("device", OWN)
    wanted["metadata"]["annotations"] = {CHECKPOINTS: "[]"}
    assert denials("devices", wanted, None) == ()
    assert denials("devices", None, wanted) == ()
    before = {**wanted, "metadata": {"name": OWN, "resourceVersion": "1", "labels": {"a": "b"}}}
    before["spec"] = {"devices": [{"type": "rdma", "minor": 0, "id": "r"}]}
    patch = device_patch(before, wanted, "[]")
    assert patch
    assert denials("devices", merge(copy.deepcopy(before), patch), before) == ()


def test_device_of_another_node_is_neither_created_nor_deleted() -> None:
    other = existing("device", "other")
    assert denials("devices", other, None)
    assert denials("devices", None, other)
    assert denials("devices", {**existing("device", OWN), "metadata": {"name": OWN, "finalizers": ["a/b"]}}, None)


def test_pod_annotations_that_the_policy_allows_are_the_records_of_the_vocabularies() -> None:
    variable = next(v for v in POLICIES["pods"]["variables"] if v["name"] == "record")
    keys = [*evaluated(variable["expression"], {}), "vke.volcengine.com/gpu-index-container-c"]
    for key in keys:
        assert key == APPLIED or any(dialect.owns_annotation(key) for dialect in dialects.ALL), key
        assert patched("pod", {"metadata": {"annotations": {key: "x"}}}) == ()
    assert patched("pod", {"metadata": {"annotations": {RETRY: "2026-11-24T00:00:00.000+00:00"}}}) == ()
    assert patched("pod", {"metadata": {"annotations": {RETRY: "x" * 65}}})
    for record in ({"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"},):
        assert patched("pod", {"metadata": {"uid": "uid-p", "annotations": record}}) == ()


def test_own_event_is_accepted() -> None:
    assert denials("events", event(), None) == ()
    assert denials("events", event(involvedObject=node_reference(OWN)), None) == ()


@pytest.mark.parametrize("target", ["node", "pod", "device"])
def test_token_that_names_no_node_writes_nothing(target: str) -> None:
    old = existing(target, OWN)
    assert denials(f"{target}s", old, old, node=None)
    assert denials(f"{target}s", old, old) == ()
    assert denials("events", event(), None, node=None)


def test_other_users_are_not_held_to_the_policy() -> None:
    old = existing("node", OWN)
    assert denials("nodes", {**old, "spec": {"unschedulable": True}}, old, user="system:admin") == ()
