"""Shapes of pods, classes of nodes, and the free milli of cards."""

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
def test_shape_of_request(containers: list[ContainerRequest], shape: tuple[int, int, int]) -> None:
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
def test_shape_of_constrained_request_lists_models(
    constraints: dict[str, tuple[str, ...]], models: tuple[str, ...]
) -> None:
    assert shape_of(request(ContainerRequest("c", 1, 250), **constraints), NEEDS, MODELS).models == models


def test_shape_for_absent_models_fits_nowhere() -> None:
    shape = shape_of(request(ContainerRequest("c", 1, 250), models=("H100",)), NEEDS, MODELS)
    for model in MODELS:
        assert milli_per_card(shape, NodeClass(64_000, 256 * GIB, 8, model, 80 * GIB)) is None


def test_free_milli_is_the_scarcer_of_core_and_memory() -> None:
    cards = [state(0), state(1, core=300, gib_used=8), state(2, core=100, gib_used=60)]
    sick = replace(state(3), card=replace(state(3).card, healthy=False))
    assert free_milli([*cards, sick]) == [1000, 700, 250, 0]
    assert free_milli_of_card(cards[1], 100, 40 * GIB) == 400
    assert free_milli_of_card(cards[1], 1000, 0) == 0
    assert free_milli_of_card(replace(cards[1], gpuid="zxcvb")) == 0


def test_class_of_equal_machines_is_the_same() -> None:
    cards = [state(0), state(1, core=500), state(2, gib=40)]
    one, other = (Node("n", allocatable=CpuMemory(64_000, 256 * GIB + kib * 1024)) for kib in (8, 72))
    assert class_of(one, cards) == class_of(other, cards) == NodeClass(64_000, 256 * GIB, 3, "A100-SXM4-80GB", 80 * GIB)
    assert class_of(Node("n", allocatable=UNBOUNDED), cards).cpu > 1 << 60


NODE = NodeClass(8000, 64 * GIB, 2, "T4", 16 * GIB)


@pytest.mark.parametrize(
    ("shape", "milli"),
    [
        pytest.param(Shape(1, 1), 0, id="no card"),
        pytest.param(Shape(1, 1, 1, 300), 300, id="core"),
        pytest.param(Shape(1, 1, 1, 300, 8 * GIB), 500, id="the scarcer of core and memory"),
        pytest.param(Shape(1, 1, 1, 0, 16 * GIB // 3), 333, id="memory alone, rounded down as free memory is"),
        pytest.param(Shape(1, 1, 1), 1, id="a share of nothing still counts"),
        pytest.param(Shape(1, 1, 1, 1000, 17 * GIB), None, id="more memory than a card has"),
        pytest.param(Shape(1, 1, 3, 100), None, id="more cards than the node has"),
        pytest.param(Shape(1, 1, 1, 300, models=("A100",)), None, id="another model"),
        pytest.param(Shape(1, 1, 1, 300, models=("A100", "T4")), 300, id="one of the models"),
    ],
)
def test_milli_per_card_of_shape(shape: Shape, milli: int | None) -> None:
    assert milli_per_card(shape, NODE) == milli


def test_milli_per_card_without_known_memory_is_none() -> None:
    assert milli_per_card(Shape(1, 1, 1, 0, GIB), NODE._replace(card_memory=0)) is None
