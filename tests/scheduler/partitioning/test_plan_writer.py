"""Two write one annotation, and any number one ConfigMap: nothing that another one wrote is lost."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.kube import ApiError, Unreachable
from mgpu.model.mps_config import read_config, write_config
from mgpu.model.node_slices import ANNOTATION, EXISTING, LABEL, read_partitioning
from mgpu.model.slice_names import MIG, MPS, Slice, count_slices
from scheduler.cluster.slice_state import PartitionPlan
from scheduler.partitioning.plan_writer import PlanWriter, SharingConfigs
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, FakeApi
from tests.scheduler.partitioning.cluster import Agent, slices

ONES = slices(*((0, start, "1g.10gb") for start in range(7)))
TWOS = slices((0, 0, "2g.20gb"), (0, 2, "2g.20gb"))
FOREIGN = {"somebody.else/key": "kept"}
NAME = "mps-configmap"


def written(mode: str = MIG) -> tuple[PlanWriter, Agent]:
    agent = Agent(FakeApi(), mode=mode)
    api: Any = agent.api
    return PlanWriter(api, SETTINGS), agent


def plan(id: int, *places: Slice, before: int | None = None) -> PartitionPlan:
    return PartitionPlan("n1", id, places, before)


@examples(40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["agent", "plan", "agent between"]), st.sets(st.sampled_from(ONES))),
        max_size=8,
    )
)
def test_nothing_that_the_other_one_wrote_is_lost(steps: list[tuple[str, set[Slice]]]) -> None:
    writer, agent = written()
    agent.api.annotate("n1", **{ANNOTATION: json.dumps(FOREIGN)})
    last: int | None = None
    wanted: set[Slice] = set()
    for number, (who, places) in enumerate(steps, 1):

        def report(places: set[Slice] = places) -> None:
            agent.made = dict.fromkeys(places, "")
            agent.report()

        if who == "agent":
            report()
        else:
            agent.api.between = report if who == "agent between" else None
            wanted = places if who == "plan" else {*TWOS}
            assert writer.write_plan(plan(number, *sorted(wanted), before=last)) is None
            last = number
        said = read_partitioning(agent.said)
        assert json.loads(agent.said)["somebody.else/key"] == "kept"
        assert (said.plan, said.spec) == (last, count_slices(wanted))
        assert said.free == count_slices(agent.made)
        assert {s.place for s in agent.found.existing} == agent.made.keys()
        assert agent.found.planned == (tuple(sorted(wanted)) if last else None)


def _relabelled(agent: Agent) -> None:
    raw = agent.api.nodes["n1"]
    agent.api.put("nodes", {**raw, "metadata": {**raw["metadata"], "labels": {LABEL: MPS}}})
    agent.api.annotate("n1", **{EXISTING: '{"cards": {}}'})


OVERTAKEN: dict[str, tuple[Callable[[Agent], object], str]] = {
    "by another plan": (
        lambda agent: agent.api.annotate("n1", **{ANNOTATION: '{"spec-partitioning-plan": 8}'}),
        "the node has plan 8 by now",
    ),
    "by a pod": (
        lambda agent: agent.make(ONES[0], pod="uid-p"),
        "card 0 has a 1g.10gb at 0 that is in use by now",
    ),
    "by another label": (_relabelled, "the cards of the node are partitioned by mps now"),
    "by one who damages it": (
        lambda agent: agent.api.annotate("n1", **{ANNOTATION: "{"}),
        "metadata.annotations[dynamicgpuslice]: is not JSON",
    ),
    "by the end of the node": (lambda agent: agent.api.remove("nodes", "n1"), "404"),
}


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("name", OVERTAKEN)
def test_a_plan_that_is_overtaken_is_not_written(name: str, between: bool) -> None:
    happens, why = OVERTAKEN[name]
    writer, agent = written()

    def happened() -> None:
        happens(agent)

    if between:
        agent.api.between = happened
    else:
        happened()
    assert why in str(writer.write_plan(plan(7, *TWOS)))
    if "n1" in agent.api.nodes:
        assert "mgpu.io/slices-planned" not in agent.api.nodes["n1"]["metadata"]["annotations"]


def test_a_plan_that_has_landed_is_not_written_again() -> None:
    writer, agent = written()
    assert writer.write_plan(plan(7, *TWOS)) is None
    version = agent.api.nodes["n1"]["metadata"]["resourceVersion"]
    assert writer.write_plan(plan(7, *TWOS)) is None
    assert agent.api.nodes["n1"]["metadata"]["resourceVersion"] == version
    assert writer.write_plan(plan(7, *ONES)) == "the node has plan 7 by now"


def test_where_nobody_answers_it_is_not_known() -> None:
    writer, agent = written()
    agent.api.broken = {"nodes"}
    with pytest.raises(ApiError):
        writer.write_plan(plan(7, *TWOS))
    agent.api.reachable = False
    with pytest.raises(Unreachable):
        writer.write_plan(plan(7, *TWOS))


def test_the_entries_of_other_nodes_stay() -> None:
    writer, agent = written(MPS)
    writer.write_config("n1", {0: {"4gb": 2}})
    agent.api.between = lambda: writer.write_config("n2", {1: {"10gb": 1}})
    writer.write_config("n1", {0: {"4gb": 1}})
    data = agent.api.configmaps[NAME]["data"]
    assert {node: read_config(text) for node, text in data.items()} == {"n1": {0: {"4gb": 1}}, "n2": {1: {"10gb": 1}}}


def test_one_who_creates_it_first_is_not_overwritten() -> None:
    writer, agent = written(MPS)
    theirs = {"metadata": {"name": NAME}, "data": {"default": "theirs"}}
    agent.api.between = lambda: agent.api.create(writer.maps, theirs)
    writer.write_config("n1", {0: {"4gb": 1}})
    assert agent.api.configmaps[NAME]["data"] == {"default": "theirs", "n1": write_config({0: {"4gb": 1}})}


def test_what_comes_to_the_same_is_left_as_its_author_wrote_it() -> None:
    writer, agent = written(MPS)
    text = "# by hand\n" + write_config({0: {"4gb": 1}})
    agent.api.put(
        "configmaps", {"metadata": {"namespace": "mgpu-system", "name": NAME, "uid": "u"}, "data": {"n1": text}}
    )
    writer.write_config("n1", {0: {"4gb": 1}, 1: {}})
    assert agent.api.configmaps[NAME]["data"]["n1"] == text
    writer.write_config("n1", {})
    assert read_config(agent.api.configmaps[NAME]["data"]["n1"]) == {}


def test_of_a_configmap_only_the_entries_that_change_are_told() -> None:
    """All nodes share it: looking at each of them at each change would cost more the more there are."""
    told: list[set[str]] = []
    configs = SharingConfigs(lambda nodes: told.append({*nodes}))
    configs.changed({"data": {"n1": "a", "n2": "b", "n3": "c"}})
    configs.changed({"data": {"n1": "a", "n2": "x", "n4": "d"}})
    configs.gone({"data": {}})
    assert told == [{"n1", "n2", "n3"}, {"n2", "n3", "n4"}, {"n1", "n2", "n4"}]
