"""Wishes at admission: any vocabulary, on creation and later."""

from typing import Any

import orjson
import pytest

from mgpu.settings import load_settings
from tests.builders import CORE, container, pod, share
from tests.mgpu.serving.reviews import review
from webhook.admission import make_app
from webhook.pod_rules import unknown_constraints, validate_create, validate_update

SETTINGS = load_settings()
MODELS, UUIDS = "mgpu.io/card-models", "mgpu.io/card-uuids"
SPREAD, SAME = "mgpu.io/spread-group", "mgpu.io/same-card-group"


def fields(raw: Any) -> list[str]:
    return [problem.field for problem in validate_create(raw, SETTINGS)]


def changes(before: dict[str, str], now: dict[str, str], node: str = "", **more: Any) -> list[str]:
    old, new = share(annotations=before, node=node, **more), share(annotations=now, node=node, **more)
    return [str(problem) for problem in validate_update(new, old, "alice", SETTINGS)]


def test_good_wishes_pass() -> None:
    annotations = {MODELS: "A100", SPREAD: "web", SAME: "pair", "mgpu.io/card-policy": "spread"}
    assert fields(share(annotations=annotations)) == []


def test_a_bad_wish_is_denied_with_field_and_rule_beside_all_other_problems() -> None:
    raw = pod("p", container("c", 120, 512), annotations={MODELS: " ", SPREAD: "?"})
    assert fields(raw) == [
        f"metadata.annotations[{MODELS}]",
        f"metadata.annotations[{SPREAD}]",
        f"spec.containers[0].resources.requests[{CORE}]",
    ]


def test_a_pod_without_gpu_may_say_anything() -> None:
    raw = pod("p", {"name": "c"}, annotations={MODELS: "", "mgpu.io/odd": "x"})
    assert fields(raw) == []
    assert unknown_constraints(raw, None) == []


def test_wishes_of_a_vocabulary_that_is_not_served_yet_are_held_to_the_rules_too() -> None:
    requests = {"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}
    assert fields(pod("p", requests, annotations={SPREAD: ""})) == [f"metadata.annotations[{SPREAD}]"]


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (
            {SAME: "pair"},
            f"metadata.annotations[{SAME}]: all containers of the group share one card, container 'b' asks for 2 cards",
        ),
        ({UUIDS: "GPU-1"}, f"metadata.annotations[{UUIDS}]: names 1 card, container 'b' asks for 2 cards"),
    ],
)
def test_what_no_cluster_can_meet_is_denied(annotations: dict[str, str], message: str) -> None:
    raw = pod("p", container("a", 50, 512), container("b", 200), annotations=annotations)
    assert [str(problem) for problem in validate_create(raw, SETTINGS)] == [message]


def test_until_a_pod_has_a_node_its_wishes_may_change_to_good_ones() -> None:
    assert changes({MODELS: "A100"}, {MODELS: "H100", SPREAD: "web"}) == []
    assert changes({MODELS: "A100"}, {}) == []
    assert changes({}, {MODELS: ","}) == [
        f"metadata.annotations[{MODELS}]: must name at least one; leave it out to allow any"
    ]


def test_a_bad_wish_that_was_there_before_keeps_nobody_from_repairing_another() -> None:
    bad = {MODELS: "", SPREAD: "?"}
    assert changes(bad, {MODELS: "A100", SPREAD: "?"}) == []
    assert changes(bad, {**bad, "team": "a"}) == []


def test_once_a_pod_has_a_node_its_wishes_stay() -> None:
    for before, now in (({}, {SAME: "pair"}), ({SAME: "pair"}, {}), ({SAME: "pair"}, {SAME: "other"})):
        assert changes(before, now, node="n1") == [
            f"metadata.annotations[{SAME}]: cannot be changed: the cards are decided, and the pod is on n1"
        ]
    assert changes({SAME: "pair"}, {SAME: "pair", "team": "a"}, node="n1") == []


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("mgpu.io/card-model", "did you mean mgpu.io/card-models?"),
        ("mgpu.io/Spread-Group", "did you mean mgpu.io/spread-group?"),
        ("mgpu.io/xyz", "the constraints are mgpu.io/card-policy, mgpu.io/card-models"),
    ],
)
def test_what_only_looks_like_a_wish_is_warned_of_once(key: str, hint: str) -> None:
    raw = share(annotations={key: "A100", MODELS: "A100", "team": "a"})
    (warning,) = unknown_constraints(raw, None)
    assert warning.startswith(f"metadata.annotations[{key}]: is unknown to mgpu and has no effect; ")
    assert hint in warning
    assert unknown_constraints(raw, raw) == []
    assert unknown_constraints(raw, share(annotations={MODELS: "A100"})) == [warning]


def test_warnings_reach_the_user_with_a_denial_too() -> None:
    client = make_app(SETTINGS).test_client()
    for core, allowed in ((50, True), (120, False)):
        raw = share(core=core, annotations={"mgpu.io/card-model": "A100"})
        answer = client.post("/validate", data=orjson.dumps(review(raw, "CREATE")), content_type="application/json")
        response = answer.get_json()["response"]
        assert response["allowed"] is allowed
        assert [text.split(":")[0] for text in response["warnings"]] == ["metadata.annotations[mgpu.io/card-model]"]
