"""The admission rules for all GPU pods. The rules of each vocabulary are tested in tests/mgpu/dialects."""

from typing import Any

import pytest

from mgpu.model import budget
from mgpu.model.errors import BadObject
from mgpu.settings import Settings, load_settings
from tests.builders import CORE, MEMORY, container, pod, share
from webhook.pod_rules import unknown_constraints, validate_create, validate_update

SETTINGS = load_settings()
ASSUMED, INDEX = "vke.volcengine.com/assumed", "vke.volcengine.com/gpu-index-container-c"
MULTIPLE, POLICY = "vke.volcengine.com/container-multiple-gpu", "vke.volcengine.com/mgpu-compute-policy"
SCHEDULER = "system:serviceaccount:mgpu-system:mgpu-scheduler"


def fields(raw: Any) -> list[str]:
    return [problem.field for problem in validate_create(raw, SETTINGS)]


def changes(old: Any, new: Any, user: str = "alice", settings: Any = SETTINGS) -> list[str]:
    return [str(problem) for problem in validate_update(new, old, user, settings)]


@pytest.mark.parametrize("raw", [share(), pod("p", container("c", 200)), pod("p", {"name": "c"}), {}])
def test_valid_pod_has_no_problem(raw: Any) -> None:
    assert validate_create(raw, SETTINGS) == []


def test_problems_of_a_pod_are_unique_and_in_the_order_of_its_fields() -> None:
    good = container("ok", 50, 1024)
    bad = [container(f"c{i}", 120) for i in range(12)]
    found = fields(pod("p", *bad, init=(container("i", -1),), annotations={POLICY: "odd"}) | {"kind": "Pod"})
    assert found == [
        f"metadata.annotations[{POLICY}]",
        *(f"spec.containers[{i}].resources.requests[{CORE}]" for i in range(12)),
        f"spec.initContainers[0].resources.requests[{CORE}]",
    ]
    assert fields(pod("p", good, bad[0])) == [f"spec.containers[1].resources.requests[{CORE}]"]


@pytest.mark.parametrize("other", ["aliyun.com/gpu-mem", "koordinator.sh/gpu", "nvidia.com/gpu", "nvidia.com/gpu-4gb"])
def test_pod_with_two_vocabularies_is_denied(other: str) -> None:
    raw = pod("p", container("a", 50, 1024), {"name": "b", "resources": {"limits": {other: "1"}}})
    assert fields(raw) == [f"spec.containers[1].resources.limits[{other}]"]


def test_share_resource_without_request_is_denied() -> None:
    carrier = {"resources": {"limits": {"mgpu.io/share": "1"}}}
    assert fields(pod("p", {"name": "a", **carrier})) == ["spec.containers[0].resources.limits[mgpu.io/share]"]
    assert fields(pod("p", container("a", 50, 1024), {"name": "b", **carrier})) == []  # the mutation removes it


def test_annotation_of_another_vocabulary_is_denied() -> None:
    raw = share(annotations={"lsalab.nthu/GPUID": "a"})
    assert [p.field for p in validate_create(raw, SETTINGS, SCHEDULER)] == ["metadata.annotations[lsalab.nthu/GPUID]"]


def test_unequal_requests_and_limits_are_denied() -> None:
    raw = pod("p", {"name": "c", "resources": {"requests": {CORE: "100"}, "limits": {CORE: "200"}}})
    assert [str(p) for p in validate_create(raw, SETTINGS)] == [
        f"spec.containers[0].resources.limits[{CORE}]: must equal the request, which is 100, not 200"
    ]
    same = {"requests": {CORE: "50", MEMORY: "6k"}, "limits": {CORE: "50", MEMORY: "6000"}}
    assert fields(pod("p", {"name": "c", "resources": same})) == []


def test_unequal_amounts_of_a_disabled_vocabulary_are_denied() -> None:
    raw = pod("p", {"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}})
    assert fields(raw) == ["spec.containers[0].resources.limits[nvidia.com/gpu]"]


def test_pod_with_wrong_types_is_a_bad_object() -> None:
    with pytest.raises(BadObject, match=r"spec\.containers: must be a list"):
        validate_create({"spec": {"containers": "c"}}, SETTINGS)


def test_change_of_status_labels_finalizers_or_other_annotations_is_allowed() -> None:
    old = share(annotations={ASSUMED: "true", INDEX: "0"})
    meta = {**old["metadata"], "finalizers": [], "labels": {"a": "b"}, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    meta["annotations"] = {**meta["annotations"], "team": "a"}
    assert changes(old, {**old, "metadata": meta, "status": {"phase": "Running"}}) == []


PLACED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "changed": ({INDEX: "0"}, {INDEX: "1"}),
    "added": ({}, {INDEX: "1"}),
    "removed": ({INDEX: "0"}, {}),
}


@pytest.mark.parametrize(("before", "now"), PLACED.values(), ids=PLACED)
def test_change_of_a_placement_is_denied_unless_the_user_is_trusted(
    before: dict[str, str], now: dict[str, str]
) -> None:
    old, new = share(annotations=before), share(annotations=now)
    assert changes(old, new) == [
        f"metadata.annotations[{INDEX}]: records a placement; only mgpu may change it, not alice"
    ]
    assert changes(old, new, "system:node:n1") != []
    assert changes(old, new, SCHEDULER) == []
    assert changes(old, new, SCHEDULER.replace("mgpu-system", "default")) != []


def test_trusted_users_are_a_setting() -> None:
    settings = load_settings(flags={"webhook.identities": "alice, bob"})
    old, new = share(), share(annotations={INDEX: "1"})
    assert changes(old, new, "bob", settings) == []
    assert changes(old, new, SCHEDULER, settings) != []


ASKED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    MULTIPLE: ({MULTIPLE: "2"}, {MULTIPLE: "1"}),
    POLICY: ({}, {POLICY: "native-burst-share"}),
}


@pytest.mark.parametrize(("key", "before", "now"), [(k, *v) for k, v in ASKED.items()], ids=ASKED)
def test_change_of_a_request_is_denied_to_every_user(key: str, before: dict[str, str], now: dict[str, str]) -> None:
    for user in ("alice", SCHEDULER):
        found = changes(share(annotations=before), share(annotations=now), user)
        assert found == [f"metadata.annotations[{key}]: is part of the pod's request, which is immutable"]


def test_request_in_another_notation_is_no_change() -> None:
    assert changes(share(annotations={MULTIPLE: "2"}), share(annotations={MULTIPLE: " 2 "})) == []


ALL_OFF = load_settings(flags={f"dialects.{name}.enabled": "false" for name, _ in load_settings().dialects})


@pytest.mark.parametrize("settings", [SETTINGS, ALL_OFF], ids=["on", "off"])
@pytest.mark.parametrize("key", [INDEX, "mgpu.io/seal", "scheduling.koordinator.sh/device-allocated"])
def test_record_on_a_pod_without_gpu_is_denied(key: str, settings: Settings) -> None:
    plain, marked = pod("p", {"name": "c"}), pod("p", {"name": "c"}, annotations={key: "1"})
    rule = "records a placement; only mgpu may change it, not"
    for old, new in ((plain, marked), (marked, plain)):
        assert changes(old, new, "alice", settings) == [f"metadata.annotations[{key}]: {rule} alice"]
        assert changes(old, new, SCHEDULER, settings) == []
    assert [str(p) for p in validate_create(marked, settings)] == [
        f"metadata.annotations[{key}]: {rule} an unnamed user"
    ]
    assert validate_create(marked, settings, SCHEDULER) == []


def test_pod_without_gpu_may_have_other_annotations() -> None:
    assert changes(pod("p", {"name": "c"}), pod("p", {"name": "c"}, annotations={"team": "a"})) == []


def test_unknown_constraints_are_limited() -> None:
    odd = share(annotations={f"mgpu.io/{i:05}": "" for i in range(1000)})
    assert [text[:35] for text in unknown_constraints(odd, None)] == [
        f"metadata.annotations[mgpu.io/{i:05}]" for i in range(20)
    ]


def test_update_of_a_pod_with_too_many_containers_reads_none() -> None:
    wide = pod("p", *(container(f"c{i}", 50, 1024) for i in range(budget.MAX_CONTAINERS + 1)))
    changed = {**wide, "metadata": {**wide["metadata"], "annotations": {MULTIPLE: "2"}}}
    old, new = ({**raw, "spec": {"containers": raw["spec"]["containers"][:1]}} for raw in (wide, changed))
    assert changes(wide, changed) == []  # such a pod gets no cards, so its request has no meaning
    assert changes(old, new) != []
