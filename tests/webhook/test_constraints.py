"""Constraints at admission, in every vocabulary, on creation and on updates."""

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


def test_pod_with_valid_constraints_has_no_problem() -> None:
    annotations = {MODELS: "A100", SPREAD: "web", SAME: "pair", "mgpu.io/card-policy": "spread"}
    assert fields(share(annotations=annotations)) == []


def test_pod_with_invalid_constraints_is_denied_with_all_problems() -> None:
    raw = pod("p", container("c", 120, 512), annotations={MODELS: " ", SPREAD: "?"})
    assert fields(raw) == [
        f"metadata.annotations[{MODELS}]",
        f"metadata.annotations[{SPREAD}]",
        f"spec.containers[0].resources.requests[{CORE}]",
    ]


def test_pod_without_gpu_may_have_invalid_constraints() -> None:
    raw = pod("p", {"name": "c"}, annotations={MODELS: "", "mgpu.io/odd": "x"})
    assert fields(raw) == []
    assert unknown_constraints(raw, None) == []


def test_constraints_of_a_disabled_vocabulary_are_validated() -> None:
    requests = {"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}
    assert fields(pod("p", requests, annotations={SPREAD: ""})) == [f"metadata.annotations[{SPREAD}]"]


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (
            {SAME: "pair"},
            f"metadata.annotations[{SAME}]: all containers of the group share one card, "
            "but container 'b' requests 2 cards",
        ),
        ({UUIDS: "GPU-1"}, f"metadata.annotations[{UUIDS}]: names 1 card, but container 'b' requests 2 cards"),
    ],
)
def test_constraint_that_no_cluster_can_meet_is_denied(annotations: dict[str, str], message: str) -> None:
    raw = pod("p", container("a", 50, 512), container("b", 200), annotations=annotations)
    assert [str(problem) for problem in validate_create(raw, SETTINGS)] == [message]


def test_constraints_of_a_pod_without_node_may_change_to_valid_ones() -> None:
    assert changes({MODELS: "A100"}, {MODELS: "H100", SPREAD: "web"}) == []
    assert changes({MODELS: "A100"}, {}) == []
    assert changes({}, {MODELS: ","}) == [
        f"metadata.annotations[{MODELS}]: must have at least one entry; leave it out to allow any"
    ]


def test_invalid_constraint_of_the_old_pod_allows_other_changes() -> None:
    bad = {MODELS: "", SPREAD: "?"}
    assert changes(bad, {MODELS: "A100", SPREAD: "?"}) == []
    assert changes(bad, {**bad, "team": "a"}) == []


def test_constraints_of_a_pod_with_node_are_immutable() -> None:
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
def test_new_annotation_similar_to_a_constraint_is_warned_about(key: str, hint: str) -> None:
    raw = share(annotations={key: "A100", MODELS: "A100", "team": "a"})
    (warning,) = unknown_constraints(raw, None)
    assert warning.startswith(f"metadata.annotations[{key}]: is unknown to mgpu and has no effect; ")
    assert hint in warning
    assert unknown_constraints(raw, raw) == []
    assert unknown_constraints(raw, share(annotations={MODELS: "A100"})) == [warning]


def test_denied_pod_gets_warnings_too() -> None:
    client = make_app(SETTINGS).test_client()
    for core, allowed in ((50, True), (120, False)):
        raw = share(core=core, annotations={"mgpu.io/card-model": "A100"})
        answer = client.post("/validate", data=orjson.dumps(review(raw, "CREATE")), content_type="application/json")
        response = answer.get_json()["response"]
        assert response["allowed"] is allowed
        assert [text.split(":")[0] for text in response["warnings"]] == ["metadata.annotations[mgpu.io/card-model]"]
