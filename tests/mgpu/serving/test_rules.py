"""Every broken rule is counted under a name of its own."""

import pytest

from mgpu.serving.rules import ALL, OTHER, rule_of
from mgpu.settings import load_settings
from tests import builders as b
from tests.mgpu.dialects.contract import CASES
from webhook.mtgpupod_rules import validate_mtgpupod_create
from webhook.pod_rules import validate_create, validate_update

SETTINGS = load_settings()
MALFORMED = {f"{case.name}: {what}": raw for case in CASES.values() for what, (raw, _) in case.malformed.items()}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_dialects_refuse_has_a_name(name: str) -> None:
    rules = {rule_of(problem.message) for problem in validate_create(MALFORMED[name], SETTINGS)}
    assert rules
    assert OTHER not in rules
    assert rules <= set(ALL)


@pytest.mark.parametrize(
    ("constraints", "rule"),
    [
        ({"card-policy": "best"}, "policy"),
        ({"card-models": ","}, "wish-malformed"),
        ({"card-models": "T4", "exclude-card-models": "T4"}, "wish-malformed"),
        ({"spread-group": "-"}, "wish-malformed"),
    ],
)
def test_wishes(constraints: dict[str, str], rule: str) -> None:
    raw = b.share(annotations={f"mgpu.io/{key}": text for key, text in constraints.items()})
    assert {rule_of(problem.message) for problem in validate_create(raw, SETTINGS)} == {rule}


def test_what_may_not_change() -> None:
    index = "vke.volcengine.com/gpu-index-container-c"
    old, new = b.share(annotations={index: "0"}), b.share(annotations={index: "1"})
    assert {rule_of(p.message) for p in validate_update(new, old, "alice", SETTINGS)} == {"placement-is-ours"}


def test_mtgpupods() -> None:
    raw = b.mtgpupod("m")
    del raw["spec"]["nodeName"]
    raw["metadata"]["annotations"] = {"lsalab.nthu/gpu_request": "2"}
    rules = {rule_of(problem.message) for problem in validate_mtgpupod_create(raw, SETTINGS)}
    assert rules <= {"mtgpu-incomplete", "mtgpu-malformed"}
    assert "mtgpu-incomplete" in rules
