"""Pods that request slices, at admission."""

from typing import Any

import pytest

from mgpu.dialects.slices import GIVEN
from mgpu.settings import load_settings
from tests.builders import pod
from tests.mgpu.serving.reviews import patched
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create, validate_update

SETTINGS = load_settings()
MIG, MPS, SHARE = "nvidia.com/mig-2g.20gb", "nvidia.com/gpu-2gb", "mgpu.io/share"
USER = {"runAsUser": 1000}


def asking(resource: str, amount: str = "1", name: str = "c", **more: Any) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": {resource: amount}}, **more}


def with_spec(raw: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**raw, "spec": {**raw["spec"], **spec}}


def admitted(raw: dict[str, Any]) -> dict[str, Any]:
    result = patched(raw, mutate(raw, SETTINGS).patch)
    assert mutate(result, SETTINGS).patch == ()
    assert validate_create(result, SETTINGS) == []
    return result


@pytest.mark.parametrize(("resource", "amount"), [(MIG, "3"), (MPS, "1"), ("nvidia.com/mig-1g.10gb.me", "1")])
def test_slice_pod_gets_requests_and_no_share_resource(resource: str, amount: str) -> None:
    (container,) = admitted(pod("p", asking(resource, amount)))["spec"]["containers"]
    assert container["resources"] == {"limits": {resource: amount}, "requests": {resource: amount}}


def test_share_resource_of_a_slice_pod_is_removed_with_a_warning() -> None:
    raw = pod("p", {"name": "c", "resources": {"limits": {MIG: "1", SHARE: "1"}}})
    assert SHARE not in admitted(raw)["spec"]["containers"][0]["resources"]["limits"]
    assert mutate(raw, SETTINGS).warnings == (
        f"spec.containers[0].resources[{SHARE}]: removed; mgpu sets it where it is needed",
    )


def test_visible_devices_of_a_container_with_slices_are_removed() -> None:
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    raw = pod("p", asking(MIG, env=[*env]), {"name": "d", "env": [*env]})
    with_slice, without = admitted(raw)["spec"]["containers"]
    assert (with_slice["env"], without["env"]) == ([], env)
    (warning,) = mutate(raw, SETTINGS).warnings
    assert warning.startswith("spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]: removed")


def test_record_of_an_exported_slice_pod_is_removed() -> None:
    raw = pod("p", asking(MIG), node="n1", annotations={GIVEN: '{"c":{"mig-2g.20gb":["0:0"]}}'})
    assert admitted(raw)["metadata"]["annotations"] == {}


SPEC = "spec.securityContext.runAsUser"


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (pod("p", asking(MPS)), [SPEC]),
        (with_spec(pod("p", asking(MPS)), securityContext=USER), []),
        (pod("p", asking(MPS, securityContext=USER), {"name": "d"}), []),
        (with_spec(pod("p", asking(MPS), asking(MPS, name="d")), securityContext=None), [SPEC]),
        (
            pod("p", asking(MPS, securityContext=USER), asking(MPS, name="d")),
            ["spec.containers[1].securityContext.runAsUser"],
        ),
        (pod("p", asking(MIG)), []),
        (pod("p", {"name": "c"}), []),
    ],
    ids=str,
)
def test_missing_user_of_an_mps_pod_is_warned_about_and_not_added(raw: dict[str, Any], fields: list[str]) -> None:
    mutation = mutate(raw, SETTINGS)
    assert [warning.split(":")[0] for warning in mutation.warnings] == fields
    assert all("mgpu does not add it" in warning for warning in mutation.warnings)
    assert all("resources" in operation["path"] for operation in mutation.patch)


def test_mps_pod_of_a_disabled_dialect_gets_no_warning() -> None:
    off = load_settings("dialects: {slices: {enabled: false}}")
    assert mutate(pod("p", asking(MPS)), off).warnings == ()


@pytest.mark.parametrize(
    ("containers", "field"),
    [
        ([asking(MPS, "2")], f"spec.containers[0].resources.limits[{MPS}]"),
        ([asking(MPS), asking(MIG, name="d")], f"spec.containers[1].resources.limits[{MIG}]"),
        ([asking("nvidia.com/mig-7g.79gb")], "spec.containers[0].resources.limits[nvidia.com/mig-7g.79gb]"),
        ([asking("nvidia.com/gpu-4Gi")], "spec.containers[0].resources.limits[nvidia.com/gpu-4Gi]"),
        ([asking(MIG), asking("nvidia.com/gpu", name="d")], "spec.containers[1].resources.limits[nvidia.com/gpu]"),
    ],
)
def test_invalid_slice_request_is_denied_with_its_field(containers: list[dict[str, Any]], field: str) -> None:
    raw = pod("p", *containers)
    problems = validate_create(raw, SETTINGS)
    assert [problem.field for problem in problems] == [field]


def test_card_constraints_of_a_slice_pod_are_denied() -> None:
    old, new = pod("p", asking(MIG)), pod("p", asking(MIG), annotations={"mgpu.io/card-models": "A100"})
    for problems in (validate_create(new, SETTINGS), validate_update(new, old, "alice", SETTINGS)):
        assert [problem.field for problem in problems] == ["metadata.annotations[mgpu.io/card-models]"]


def test_record_of_a_slice_pod_is_reserved() -> None:
    old, new = pod("p", asking(MIG)), pod("p", asking(MIG), annotations={GIVEN: "{}"})
    assert [p.field for p in validate_update(new, old, "alice", SETTINGS)] == [f"metadata.annotations[{GIVEN}]"]
    assert validate_update(new, old, "system:serviceaccount:mgpu-system:mgpu-scheduler", SETTINGS) == []
