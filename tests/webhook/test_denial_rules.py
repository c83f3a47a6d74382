"""Each problem of admission has a rule, by which the metric `mgpu_admission_denials` counts it."""

from collections.abc import Iterable

import pytest

from mgpu.model.errors import Problem, Rule
from mgpu.settings import load_settings
from tests import builders as b
from tests.mgpu.dialects.contract import CASES
from webhook.mtgpupod_rules import validate_mtgpupod_create
from webhook.pod_rules import validate_create, validate_update

SETTINGS = load_settings()
MALFORMED = {f"{case.name}: {what}": raw for case in CASES.values() for what, (raw, _) in case.malformed.items()}


def rules(problems: Iterable[Problem]) -> set[str]:
    return {problem.rule.value for problem in problems}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_has_a_rule(name: str) -> None:
    found = rules(validate_create(MALFORMED[name], SETTINGS))
    assert found
    assert Rule.OTHER not in found


@pytest.mark.parametrize(
    ("constraints", "rule"),
    [
        ({"card-policy": "best"}, "policy"),
        ({"card-models": ","}, "constraint-malformed"),
        ({"card-models": "T4", "exclude-card-models": "T4"}, "constraint-malformed"),
        ({"card-models": "-"}, "constraint-malformed"),
        ({"card-uuids": "GPU-1," * 101}, "constraint-malformed"),
        ({"card-uuids": "G" * 129}, "too-large"),
        ({"spread-group": "-"}, "constraint-malformed"),
        ({"spread-group": "a", "same-card-group": "a"}, "constraint-malformed"),
    ],
)
def test_malformed_constraint_has_a_rule(constraints: dict[str, str], rule: str) -> None:
    raw = b.share(annotations={f"mgpu.io/{key}": text for key, text in constraints.items()})
    assert rules(validate_create(raw, SETTINGS)) == {rule}


def test_changed_placement_annotation_has_a_rule() -> None:
    index = "vke.volcengine.com/gpu-index-container-c"
    old, new = b.share(annotations={index: "0"}), b.share(annotations={index: "1"})
    assert rules(validate_update(new, old, "alice", SETTINGS)) == {"placement-is-ours"}


def test_malformed_mtgpupod_has_rules() -> None:
    raw = b.mtgpupod("m")
    del raw["spec"]["nodeName"]
    raw["metadata"]["annotations"] = {"lsalab.nthu/gpu_request": "2"}
    assert rules(validate_mtgpupod_create(raw, SETTINGS)) == {"mtgpu-incomplete", "mtgpu-malformed"}
