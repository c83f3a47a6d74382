"""The rules that admission holds GPU pods to (those of an ask itself: tests/mgpu/dialects)."""

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
def test_a_good_pod_has_no_problem(raw: Any) -> None:
    assert validate_create(raw, SETTINGS) == []


def test_every_problem_of_a_pod_is_named_once_in_the_order_of_its_fields() -> None:
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
def test_vocabularies_do_not_mix(other: str) -> None:
    raw = pod("p", container("a", 50, 1024), {"name": "b", "resources": {"limits": {other: "1"}}})
    assert fields(raw) == [f"spec.containers[1].resources.limits[{other}]"]


def test_the_carrier_alone_stands_for_no_card() -> None:
    carrier = {"resources": {"limits": {"mgpu.io/share": "1"}}}
    assert fields(pod("p", {"name": "a", **carrier})) == ["spec.containers[0].resources.limits[mgpu.io/share]"]
    assert fields(pod("p", container("a", 50, 1024), {"name": "b", **carrier})) == []  # removed at admission


def test_an_annotation_of_another_vocabulary_mixes_too() -> None:
    raw = share(annotations={"lsalab.nthu/GPUID": "a"})
    assert [p.field for p in validate_create(raw, SETTINGS, SCHEDULER)] == ["metadata.annotations[lsalab.nthu/GPUID]"]


def test_requests_and_limits_must_be_equal_in_value() -> None:
    raw = pod("p", {"name": "c", "resources": {"requests": {CORE: "100"}, "limits": {CORE: "200"}}})
    assert [str(p) for p in validate_create(raw, SETTINGS)] == [
        f"spec.containers[0].resources.limits[{CORE}]: must equal the request, which is 100, not 200"
    ]
    same = {"requests": {CORE: "50", MEMORY: "6k"}, "limits": {CORE: "50", MEMORY: "6000"}}
    assert fields(pod("p", {"name": "c", "resources": same})) == []


def test_amounts_of_a_vocabulary_that_is_not_served_must_be_equal_too() -> None:
    raw = pod("p", {"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}})
    assert fields(raw) == ["spec.containers[0].resources.limits[nvidia.com/gpu]"]


def test_json_of_a_wrong_type_is_a_bad_object() -> None:
    with pytest.raises(BadObject, match=r"spec\.containers: must be a list"):
        validate_create({"spec": {"containers": "c"}}, SETTINGS)


def test_status_finalizers_labels_and_other_annotations_may_change() -> None:
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
def test_a_placement_is_changed_by_the_suite_only(before: dict[str, str], now: dict[str, str]) -> None:
    old, new = share(annotations=before), share(annotations=now)
    assert changes(old, new) == [
        f"metadata.annotations[{INDEX}]: records a placement; only mgpu may change it, not alice"
    ]
    assert changes(old, new, "system:node:n1") != []
    assert changes(old, new, SCHEDULER) == []
    assert changes(old, new, SCHEDULER.replace("mgpu-system", "default")) != []


def test_the_suites_identities_are_a_setting() -> None:
    settings = load_settings(flags={"webhook.identities": "alice, bob"})
    old, new = share(), share(annotations={INDEX: "1"})
    assert changes(old, new, "bob", settings) == []
    assert changes(old, new, SCHEDULER, settings) != []


ASKED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    MULTIPLE: ({MULTIPLE: "2"}, {MULTIPLE: "1"}),
    POLICY: ({}, {POLICY: "native-burst-share"}),
}


@pytest.mark.parametrize(("key", "before", "now"), [(k, *v) for k, v in ASKED.items()], ids=ASKED)
def test_what_a_pod_asks_for_is_changed_by_nobody(key: str, before: dict[str, str], now: dict[str, str]) -> None:
    for user in ("alice", SCHEDULER):
        found = changes(share(annotations=before), share(annotations=now), user)
        assert found == [f"metadata.annotations[{key}]: is part of the pod's request, which is immutable"]


def test_the_same_ask_in_other_words_is_no_change() -> None:
    assert changes(share(annotations={MULTIPLE: "2"}), share(annotations={MULTIPLE: " 2 "})) == []


ALL_OFF = load_settings(flags={f"dialects.{name}.enabled": "false" for name, _ in load_settings().dialects})


@pytest.mark.parametrize("settings", [SETTINGS, ALL_OFF], ids=["on", "off"])
@pytest.mark.parametrize("key", [INDEX, "mgpu.io/seal", "scheduling.koordinator.sh/device-allocated"])
def test_a_record_on_a_pod_without_gpu_is_refused_too(key: str, settings: Settings) -> None:
    plain, marked = pod("p", {"name": "c"}), pod("p", {"name": "c"}, annotations={key: "1"})
    rule = "records a placement; only mgpu may change it, not"
    for old, new in ((plain, marked), (marked, plain)):
        assert changes(old, new, "alice", settings) == [f"metadata.annotations[{key}]: {rule} alice"]
        assert changes(old, new, SCHEDULER, settings) == []
    assert [str(p) for p in validate_create(marked, settings)] == [
        f"metadata.annotations[{key}]: {rule} an unnamed user"
    ]
    assert validate_create(marked, settings, SCHEDULER) == []


def test_a_pod_without_gpu_may_have_any_other_annotation() -> None:
    assert changes(pod("p", {"name": "c"}), pod("p", {"name": "c"}, annotations={"team": "a"})) == []


def test_of_strange_annotations_as_many_are_told_as_anybody_hears_of() -> None:
    odd = share(annotations={f"mgpu.io/{i:05}": "" for i in range(1000)})
    assert [text[:35] for text in unknown_constraints(odd, None)] == [
        f"metadata.annotations[mgpu.io/{i:05}]" for i in range(20)
    ]


def test_an_update_of_a_pod_with_more_containers_than_are_read_reads_none() -> None:
    wide = pod("p", *(container(f"c{i}", 50, 1024) for i in range(budget.MAX_CONTAINERS + 1)))
    changed = {**wide, "metadata": {**wide["metadata"], "annotations": {MULTIPLE: "2"}}}
    old, new = ({**raw, "spec": {"containers": raw["spec"]["containers"][:1]}} for raw in (wide, changed))
    assert changes(wide, changed) == []  # no process gives it cards: the annotation of its request has no meaning
    assert changes(old, new) != []
