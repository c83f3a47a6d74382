"""Small random placement problems for hypothesis: few sizes and amounts, so that ties and near misses are common."""

from dataclasses import replace
from math import comb

from hypothesis import strategies as st

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, whole_cards
from mgpu.model.pods import Stage
from scheduler.engine import POLICIES, Policy, policy_named
from tests.builders import GIB

MOST_PLACEMENTS = 2000

policies = st.tuples(st.sampled_from(["binpack", *POLICIES]), st.sampled_from([0, 20, 50, 100]))


def named(policy: tuple[str, int]) -> Policy:
    return policy_named(*policy)


@st.composite
def states(draw: st.DrawFn, index: int) -> CardState:
    gib = draw(st.sampled_from([8, 8, 12, 16]))
    card = Card(index, f"GPU-{index}", "", gib * GIB, healthy=draw(st.integers(0, 11)) < 11)
    if draw(st.booleans()):
        return CardState(card)
    core = draw(st.sampled_from([0, 100, 200, 300, 500, 800, 1200]))
    memory = draw(st.sampled_from([0, 1, 2, 3, 7, 13]))
    ratio = draw(st.sampled_from([0, 0, 13, 50, 88]))
    gpuid = draw(st.sampled_from([""] * 7 + ["zxcvb"]))
    return CardState(card, core, memory * GIB, draw(st.integers(1, 3)), ratio_used=ratio, gpuid=gpuid)


@st.composite
def containers(draw: st.DrawFn, name: str, stage: Stage, cards: int) -> ContainerRequest:
    count = draw(st.sampled_from([1, 1, 1, 2, 2, 3, cards]))
    if draw(st.integers(0, 11)) == 11:
        return ContainerRequest(name, min(count, cards), 1000, 0, whole=True, stage=stage)
    core = draw(st.sampled_from([100, 200, 300, 0, 400, 500, 700]))
    memory = draw(st.sampled_from([1, 2, 3, 0, 5, 6])) * GIB
    if draw(st.booleans()):
        return ContainerRequest(name, min(count, cards), core, memory, stage=stage)
    in_bytes = draw(st.booleans())
    ratio = 0 if in_bytes else draw(st.sampled_from([1, 13, 29, 50, 100]))
    return ContainerRequest(name, min(count, cards), core, memory if in_bytes else 0, stage=stage, ratio=ratio)


@st.composite
def problems(draw: st.DrawFn, most_containers: int = 4, most_cards: int = 6) -> tuple[GpuRequest, list[CardState]]:
    """An ask and the cards of a node; some MOST_PLACEMENTS ways at most to put one on the other."""
    count = draw(st.sampled_from(range(most_cards, 0, -1)))
    indexes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True))
    cards = [draw(states(index)) for index in indexes]
    size = draw(st.sampled_from(range(most_containers, 0, -1)))
    stages = draw(st.lists(st.sampled_from([Stage.APP, Stage.APP, *Stage]), min_size=size, max_size=size))
    stages.sort(key=lambda stage: stage is Stage.APP)
    requests: list[ContainerRequest] = []
    ways = 1
    for i, stage in enumerate(stages):
        one = draw(containers(f"c{i}", stage, len(cards)))
        if requests and draw(st.integers(0, 2)) == 0:
            last = requests[-1]
            one = replace(last, container=f"c{i}", stage=stage)
        if ways * comb(len(cards), one.cards) > MOST_PLACEMENTS:
            one = replace(one, cards=1)
        ways *= comb(len(cards), one.cards)
        requests.append(one)
    return GpuRequest("mgpu", tuple(requests), draw(st.sampled_from([0, 0, 2, 3, 16]))), cards


@st.composite
def whole_card_pods(draw: st.DrawFn) -> GpuRequest:
    """Return a pod whose containers ask for one to three whole cards each: init containers and sidecars, then apps."""
    stages = sorted(
        draw(st.lists(st.sampled_from([Stage.INIT, Stage.INIT, *Stage]), min_size=1, max_size=12)),
        key=lambda stage: stage is Stage.APP,
    )
    requests = [whole_cards(f"c{i}", draw(st.integers(1, 3)), stage) for i, stage in enumerate(stages)]
    return GpuRequest("mgpu", tuple(requests))
