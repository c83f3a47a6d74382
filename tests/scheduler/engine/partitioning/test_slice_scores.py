"""The seed's node score."""

import pytest

from mgpu.settings import load_settings
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.partitioning.slice_scores import weighted_score
from tests import builders as b
from tests.scheduler.partitioning.cluster import MIG, MPS, cluster, slices, submit, wants


def settings(text: str = "") -> SlicesSettings:
    return load_settings(text and f"dialects:\n  slices: {text}").dialects.slices


CASES: dict[str, tuple[str, dict[str, int], dict[str, int], int]] = {
    "half full, packed": ("{}", {"cpu": 1, "memory": 2, "gpu": 4}, {"cpu": 2, "memory": 4, "gpu": 8}, 5),
    "a third full, spread": (
        "{schedulePolicy: spread}",
        {"gpu": 1, "cpu": 1, "memory": 1},
        dict.fromkeys(("cpu", "memory", "gpu"), 3),
        6,
    ),
    "the seed's weights": (
        "{weight.cpu: 1, weight.memory: 2, weight.gpu: 5}",
        {"cpu": 0, "memory": 0, "gpu": 8},
        {"cpu": 1, "memory": 1, "gpu": 8},
        6,  # 5/8 of 10
    ),
    "a larger weight of the plugin ends at 10": ("{scheduleWeight: 100}", {"gpu": 1}, {"gpu": 4}, 10),
    "a smaller one": ("{scheduleWeight: 2}", {"gpu": 4}, {"gpu": 4}, 2),
    "more in use than there is": ("{}", {"gpu": 9}, {"gpu": 4}, 10),
    "what a node has none of does not count": ("{}", {"gpu": 1}, {"gpu": 2, "cpu": 0}, 5),
    "a resource by name": (
        "{weight.resources: example.com/nic, weight.resources.example.com/nic: 3}",
        {"example.com/nic": 2},
        {"example.com/nic": 2, "gpu": 4},
        7,
    ),
    "nothing at all": ("{}", {}, {}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_weighted_score_by_the_formula_of_the_seed(name: str) -> None:
    text, full, capacity, expected = CASES[name]
    assert weighted_score(full, capacity, settings(text)) == expected


def scores(text: str) -> list[int]:
    """Of n1, empty, and n2, whose one card has a 2g.20gb in use; for a pod that wants another."""
    replica, agents = cluster(("n1", MIG, 1), ("n2", MIG, 1), settings=load_settings(f"dialects:\n  slices: {text}"))
    for agent in agents.values():
        agent.make(*slices((0, 0, "2g.20gb"), (0, 2, "2g.20gb")))
    agents["n2"].give("stranger", *slices((0, 0, "2g.20gb")))
    replica.deliver()
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    return replica.filter.scores(pod, ["n1", "n2", "n3"])


def test_score_of_gpu_is_the_memory_of_slices() -> None:
    """20 of 80 GiB, and 40."""
    assert scores("{weight.cpu: 0, weight.memory: 0}") == [2, 5, 0]
    assert scores("{weight.cpu: 0, weight.memory: 0, schedulePolicy: spread}") == [7, 5, 0]


def test_score_counts_named_resources_of_pods() -> None:
    text = "dialects:\n  slices: {weight.cpu: 0, weight.memory: 0, weight.gpu: 0, weight.resources: example.com/nic}"
    replica, agents = cluster(("n1", MPS, 1), ("n2", MPS, 1), settings=load_settings(text))
    for name, agent in agents.items():
        agent.make(*slices((0, 0, "4gb")))
        raw = replica.api.nodes[name]
        replica.api.put("nodes", {**raw, "status": {"capacity": {"example.com/nic": "4"}}})
    nics = {"name": "c", "resources": {"requests": {"example.com/nic": "2"}}}
    replica.api.put("pods", b.pod("other", nics, node="n2"))
    (pod,) = submit(replica, wants("p", {"gpu-4gb": 1}))
    assert replica.filter.scores(pod, ["n1", "n2"]) == [0, 5]
    replica.api.remove("pods", "other")
    replica.deliver()
    assert replica.filter.scores(pod, ["n1", "n2"]) == [0, 0]
