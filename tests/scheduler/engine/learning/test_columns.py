"""Pods and nodes of the model as the judges see them."""

from dataclasses import replace

import pytest

from mgpu.model.compute_resources import UNBOUNDED, CpuMemory
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, whole_cards
from mgpu.model.pod_constraints import Constraints
from mgpu.model.pods import Node, Stage
from scheduler.engine.learning.shapes import (
    NodeClass,
    Shape,
    class_of,
    free_milli,
    free_milli_of_card,
    milli_per_card,
    shape_of,
)
from tests.builders import GIB, state

NEEDS = CpuMemory(4000, 8 * GIB)
MODELS = ("A100-SXM4-80GB", "Tesla-T4")


def request(*containers: ContainerRequest, **constraints: tuple[str, ...]) -> GpuRequest:
    return GpuRequest("mgpu", containers, constraints=Constraints(**constraints))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("containers", "shape"),
    [
        pytest.param([ContainerRequest("c", 1, 250, GIB)], (1, 250, GIB), id="a share"),
        pytest.param([ContainerRequest("c", 1, 0, GIB)], (1, 0, GIB), id="memory only"),
        pytest.param([whole_cards("c", 4)], (4, 1000, 0), id="whole cards"),
        pytest.param(
            [ContainerRequest("a", 1, 250, GIB), ContainerRequest("b", 2, 500)], (3, 500, GIB), id="the largest share"
        ),
        pytest.param(
            [ContainerRequest("i", 1, 500, stage=Stage.INIT), ContainerRequest("c", 1, 250)],
            (1, 500, 0),
            id="one after another",
        ),
        pytest.param(
            [
                whole_cards("i", 3, Stage.INIT),
                ContainerRequest("s", 1, 100, stage=Stage.SIDECAR),
                ContainerRequest("c", 1, 250),
            ],
            (3, 1000, 0),
            id="an init container that needs more than the others",
        ),
    ],
)
def test_shape_of(containers: list[ContainerRequest], shape: tuple[int, int, int]) -> None:
    assert shape_of(request(*containers), NEEDS, MODELS) == Shape(4000, 8 * GIB, *shape)


@pytest.mark.parametrize(
    ("constraints", "models"),
    [
        ({"models": ("T4",)}, ("Tesla-T4",)),
        ({"excluded_models": ("T4",)}, ("A100-SXM4-80GB",)),
        ({"models": ("A100", "T4")}, ()),
        ({"excluded_models": ("H100",)}, ()),
        ({}, ()),
    ],
)
def test_the_models_that_a_pod_may_have(constraints: dict[str, tuple[str, ...]], models: tuple[str, ...]) -> None:
    assert shape_of(request(ContainerRequest("c", 1, 250), **constraints), NEEDS, MODELS).models == models


def test_a_pod_for_models_that_nobody_has_fits_nowhere() -> None:
    shape = shape_of(request(ContainerRequest("c", 1, 250), models=("H100",)), NEEDS, MODELS)
    for model in MODELS:
        assert milli_per_card(shape, NodeClass(64_000, 256 * GIB, 8, model, 80 * GIB)) is None


def test_what_a_card_has_left_is_the_scarcer_of_core_and_memory() -> None:
    cards = [state(0), state(1, core=300, gib_used=8), state(2, core=100, gib_used=60)]
    sick = replace(state(3), card=replace(state(3).card, healthy=False))
    assert free_milli([*cards, sick]) == [1000, 700, 250, 0]
    assert free_milli_of_card(cards[1], 100, 40 * GIB) == 400
    assert free_milli_of_card(cards[1], 1000, 0) == 0
    assert free_milli_of_card(replace(cards[1], gpuid="zxcvb")) == 0


def test_equal_machines_are_of_one_class() -> None:
    cards = [state(0), state(1, core=500), state(2, gib=40)]
    one, other = (Node("n", allocatable=CpuMemory(64_000, 256 * GIB + kib * 1024)) for kib in (8, 72))
    assert class_of(one, cards) == class_of(other, cards) == NodeClass(64_000, 256 * GIB, 3, "A100-SXM4-80GB", 80 * GIB)
    assert class_of(Node("n", allocatable=UNBOUNDED), cards).cpu > 1 << 60
