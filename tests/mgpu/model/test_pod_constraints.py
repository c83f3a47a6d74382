"""Wishes: what the annotations may say, and what they mean for a card."""

from dataclasses import replace

import pytest

from mgpu.model.groups import Group
from mgpu.model.pod_constraints import (
    CARD_MODELS,
    CARD_POLICY,
    CARD_UUIDS,
    EXCLUDE_CARD_MODELS,
    MAX_ENTRIES,
    NO_CONSTRAINTS,
    SAME_CARD_GROUP,
    SPREAD_GROUP,
    Constraints,
    find_contradictions,
    matches_model,
    read_constraints,
)
from tests.builders import card

POLICIES = ("binpack", "spread")


@pytest.mark.parametrize(
    ("annotations", "constraints"),
    [
        ({}, NO_CONSTRAINTS),
        ({"team": "a", "mgpu.io/card-model": "A100"}, NO_CONSTRAINTS),
        ({CARD_POLICY: "spread"}, Constraints("spread")),
        ({CARD_POLICY: " BinPack "}, Constraints("binpack")),
        ({CARD_MODELS: "A100, H100 ,A100"}, Constraints(models=("A100", "H100"))),
        ({EXCLUDE_CARD_MODELS: "Tesla T4"}, Constraints(excluded_models=("Tesla T4",))),
        (
            {CARD_MODELS: "A100", EXCLUDE_CARD_MODELS: "A100-PCIE"},
            Constraints(models=("A100",), excluded_models=("A100-PCIE",)),
        ),
        ({CARD_UUIDS: "GPU-a,GPU-b"}, Constraints(uuids=("GPU-a", "GPU-b"))),
        ({SPREAD_GROUP: "web"}, Constraints(spread=Group("spread-group", "team", "web"))),
        ({SAME_CARD_GROUP: "A.b_c-9"}, Constraints(same_card=Group("same-card-group", "team", "A.b_c-9"))),
        (
            {SPREAD_GROUP: "web", SAME_CARD_GROUP: "pair"},
            Constraints(
                spread=Group("spread-group", "team", "web"), same_card=Group("same-card-group", "team", "pair")
            ),
        ),
    ],
)
def test_what_annotations_say(annotations: dict[str, str], constraints: Constraints) -> None:
    assert read_constraints(annotations, "team", POLICIES) == (constraints, ())


WRONG = {
    "a policy that is none": ({CARD_POLICY: "best"}, CARD_POLICY, "must be one of binpack, spread, not 'best'"),
    "no policy": ({CARD_POLICY: ""}, CARD_POLICY, "must be one of"),
    "an empty list": ({CARD_MODELS: ""}, CARD_MODELS, "must have at least one entry"),
    "only commas": ({CARD_UUIDS: " , "}, CARD_UUIDS, "must have at least one entry"),
    "a blank entry": ({EXCLUDE_CARD_MODELS: "T4,,A100"}, EXCLUDE_CARD_MODELS, "entry 1 is empty"),
    "too many": (
        {CARD_UUIDS: ",".join(f"GPU-{i}" for i in range(MAX_ENTRIES + 1))},
        CARD_UUIDS,
        f"at most {MAX_ENTRIES} entries, not",
    ),
    "too many to be compared with as many": (
        {CARD_MODELS: ",".join(f"A{i}" for i in range(30_000)), EXCLUDE_CARD_MODELS: ",".join(["T4"] * MAX_ENTRIES)},
        CARD_MODELS,
        f"at most {MAX_ENTRIES} entries, not 30000",
    ),
    "no word in a model": ({CARD_MODELS: "A100,-"}, CARD_MODELS, "'-' is not the name of a model"),
    "wanted and excluded": ({CARD_MODELS: "a100", EXCLUDE_CARD_MODELS: "A100"}, EXCLUDE_CARD_MODELS, "'A100' excludes"),
    "wanted, and excluded with others": (
        {CARD_MODELS: "T4,A100-SXM4", EXCLUDE_CARD_MODELS: "A100"},
        EXCLUDE_CARD_MODELS,
        "'A100' excludes 'A100-SXM4', which mgpu.io/card-models allows",
    ),
    "an empty name": ({SPREAD_GROUP: ""}, SPREAD_GROUP, "must be a name of 1 to 63"),
    "a name with a space": ({SAME_CARD_GROUP: "a b"}, SAME_CARD_GROUP, "must be a name of 1 to 63"),
    "a name that ends with a dash": ({SPREAD_GROUP: "a-"}, SPREAD_GROUP, "must be a name of 1 to 63"),
    "a name that is too long": ({SPREAD_GROUP: "a" * 64}, SPREAD_GROUP, "must be a name of 1 to 63"),
    "a name with a line end": ({SPREAD_GROUP: "a\n"}, SPREAD_GROUP, "must be a name of 1 to 63"),
    "together and apart": ({SPREAD_GROUP: "x", SAME_CARD_GROUP: "x"}, SAME_CARD_GROUP, "'x' is also the spread-group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_field_and_rule(name: str) -> None:
    annotations, key, message = WRONG[name]
    constraints, problems = read_constraints(annotations, "team", POLICIES)
    (problem,) = (*problems, *find_contradictions(constraints))
    assert problem.field == f"metadata.annotations[{key}]"
    assert message in problem.message


def test_every_problem_is_named_and_what_can_be_read_is() -> None:
    constraints, problems = read_constraints(
        {CARD_POLICY: "best", CARD_MODELS: "A100,", SPREAD_GROUP: "web"}, "n", POLICIES
    )
    assert [problem.field.split("/")[1] for problem in problems] == ["card-models]", "card-policy]"]
    assert (constraints.models, constraints.spread and constraints.spread.name) == (("A100",), "web")


def test_a_name_of_63_characters_is_one() -> None:
    assert read_constraints({SPREAD_GROUP: "a" * 63}, "n", POLICIES)[1] == ()


@pytest.mark.parametrize(
    ("wanted", "model", "same"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("a100-sxm4", "NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA-A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB", False),
        ("H100", "NVIDIA GH100", False),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("A10", "NVIDIA A100", False),
        ("A100", "A10", False),
        ("T4", "Tesla_T4", True),
        ("V100M16", "V100M16", True),
        ("RTX/6000", "Quadro RTX 6000", True),
        ("A100", "", False),
        ("", "A100", False),
    ],
)
def test_which_models_a_name_means(wanted: str, model: str, same: bool) -> None:
    assert matches_model(wanted, model) is same


def test_why_a_card_is_out() -> None:
    a100, t4, nameless = card(0), replace(card(1), model="Tesla T4"), replace(card(2), model="")
    picky = Constraints(models=("A100", "T4"), excluded_models=("Tesla",))
    assert [picky.reason_against(one) for one in (a100, t4, nameless)] == [
        None,
        "model Tesla T4 excluded by exclude-card-models",
        "model unknown not among card-models",
    ]
    assert [Constraints(uuids=(t4.uuid,)).reason_against(one) for one in (a100, t4)] == ["not among card-uuids", None]
    assert [NO_CONSTRAINTS.reason_against(one) for one in (a100, nameless)] == [None, None]
    assert picky.allows_model("A100-SXM4-80GB")
    assert not picky.allows_model("Tesla T4")
    assert picky.limits_cards
    assert not Constraints("spread", spread=Group("spread-group", "n", "a")).limits_cards


def test_how_wishes_are_shown() -> None:
    constraints, _ = read_constraints({CARD_MODELS: "A100, H100", SPREAD_GROUP: "web"}, "n", POLICIES)
    assert str(constraints) == "card-models A100,H100; spread-group web"
    assert str(NO_CONSTRAINTS) == ""
