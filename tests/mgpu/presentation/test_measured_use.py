"""Reads the pages of honest agents exactly, and the pages of hostile ones within limits."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu.model.cards import Card, CardState
from mgpu.model.slice_names import Slice
from mgpu.presentation.card_views import CardView, NodeView, SliceView
from mgpu.presentation.measured_use import (
    LARGEST_PAGE,
    NO_MEASUREMENTS,
    NOT_MEASURED,
    CardInUse,
    ClaimUse,
    ContainerUse,
    NodeUse,
    UnknownUse,
    Used,
    describe_unknown,
    read_use,
    use_of_cards,
)
from tests.agent_metrics import page

GIB = 1 << 30
LINE = 'mgpu_container_memory_used_bytes{namespace="a",pod="p",container="c",uuid="GPU-0",index="0"} '


def test_a_page_of_an_agent_is_read() -> None:
    found = read_use(page(("a/p/c", 1, 0.254, 3 * GIB), ("b/q/d", 0, None, GIB), cards=[(0, 0.5, 4 * GIB)]))
    assert found == NodeUse(
        (CardInUse(0, "GPU-n1-0", Used(500, 4 * GIB)),),
        (
            ContainerUse("b/q", "d", 0, "GPU-n1-0", Used(None, GIB), 8 * GIB),
            ContainerUse("a/p", "c", 1, "GPU-n1-1", Used(254, 3 * GIB), 8 * GIB),
        ),
    )


def test_use_of_claims_is_read_and_found_by_the_name_that_stands_for_the_claim() -> None:
    labels = 'namespace="team",claim="train",uuid="GPU-3",index="3"'
    text = f"mgpu_claim_memory_used_bytes{{{labels}}} 20\nmgpu_claim_sm_utilization_ratio{{{labels}}} 0.25\n"
    use = read_use(text.encode())
    assert use == NodeUse(claims=(ClaimUse("claim team/train", 3, "GPU-3", Used(250, 20)),))
    node = NodeView("n1", (CardView(CardState(Card(3, "GPU-3", "A100", GIB))),))
    assert use_of_cards(node, use).of_pod(3, "claim team/train") == Used(250, 20)


@pytest.mark.parametrize("text", [b"", page(), b"# HELP mgpu_agent_ready x\nmgpu_agent_ready 1\n"])
def test_a_page_without_measurements_is_not_a_use_of_0(text: bytes) -> None:
    assert read_use(text) == NO_MEASUREMENTS


def test_a_problem_of_measuring_is_said_in_words() -> None:
    problem = b'mgpu_usage_problem{reason="no-host-pids"} 1\nmgpu_usage_problem{reason="\x1b[2J"} 1\n'
    text = "processes of other containers cannot be seen, so the use per container is not measured"
    found = read_use(page(cards=[(0, 0.5, GIB)]) + problem)
    assert isinstance(found, NodeUse)
    assert found.problem == text
    assert describe_unknown(found) == f"use per pod unknown: {text}"
    assert read_use(problem) == UnknownUse(text)
    assert describe_unknown(NodeUse()) == ""


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e300", "9" * 400])
def test_a_number_that_cannot_be_right_counts_as_not_measured(value: str) -> None:
    found = read_use(f"{LINE}{value}\n{LINE.replace('memory_used_bytes', 'sm_utilization_ratio')}{value}\n".encode())
    assert isinstance(found, NodeUse)
    assert [row.used for row in found.containers] == [NOT_MEASURED]


@pytest.mark.parametrize(
    "text",
    [
        LINE.encode(),
        LINE.encode() + b"many",
        LINE.replace(',index="0"', "").encode() + b"1",
        LINE.replace('"0"', '"zero"').encode() + b"1",
        LINE.replace('"GPU-0"', "GPU-0").encode() + b"1",
        LINE.encode() + b"1\n\xff",
        LINE.encode() + b"1" + b" " * 3000,
        b'mgpu_usage_problem{reason="x"} 1\n' * 17_000,
        f"{LINE}1\n".encode() + b"#" * LARGEST_PAGE,
    ],
    ids=["no value", "no number", "no index", "index", "quotes", "UTF-8", "long line", "many lines", "large"],
)
def test_a_malformed_page_is_an_unknown_use(text: bytes) -> None:
    found = read_use(text)
    assert isinstance(found, UnknownUse)
    assert re.match("the metrics of the agent (cannot be read|have|are not text)", found.reason)
    assert len(found.reason) < 160


@settings(max_examples=40)
@given(st.text(alphabet='a"\\{}=, \t\n1_.#', max_size=60))
def test_no_line_raises_an_error(end: str) -> None:
    read_use(f"mgpu_container_memory_used_bytes{end}\nmgpu_card_memory_in_use_bytes{{{end}".encode())


def test_use_is_found_by_uuid_also_of_a_mig_instance_and_summed_by_pod() -> None:
    part = SliceView(Slice(3, 0, "1g.10gb"), CardState(Card(0, "MIG-5", "A100", GIB)))
    node = NodeView("n1", (CardView(CardState(Card(3, "GPU-3", "A100", GIB)), slices=(part,), mode="mig"),))
    use = NodeUse(
        (CardInUse(9, "GPU-3", Used(10, 20)),),
        (
            ContainerUse("a/p", "c", 9, "MIG-5", Used(None, 1)),
            ContainerUse("a/p", "d", 9, "GPU-3", Used(7, 2)),
            ContainerUse("a/q", "c", 5, "unknown", Used(1, None)),
        ),
    )
    found = use_of_cards(node, use)
    assert found.of_card(3) == Used(10, 20)
    assert found.of_pod(3, "a/p") == Used(7, 3)
    assert found.of_pod(5, "a/q") == Used(1, None)
    assert found.of_pod(3, "a/q") == found.of_card(5) == NOT_MEASURED
