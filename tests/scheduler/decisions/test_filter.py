import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.device_object import write_device
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, RejectionKind, whole_cards
from mgpu.model.pods import Node, Pod
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.filter import Filter
from scheduler.engine.node_assessment import assess
from tests import builders as b
from tests.scheduler.fake import SETTINGS

LABELLED = Node("n", {"vke.node.gpu.schedule": "mgpu"})
amounts = st.tuples(st.integers(0, 4), st.integers(0, 4))
cards = st.lists(st.tuples(st.booleans(), st.lists(amounts, max_size=3)), max_size=4)
single = st.builds(
    ContainerRequest, st.just("c"), st.integers(1, 3), st.integers(0, 4).map(lambda c: c * 250), st.integers(0, 4)
)
whole = st.integers(1, 3).map(lambda n: whole_cards("c", n))
containers = st.lists(single | whole, min_size=1, max_size=3)


def filled(nodes: list[list[tuple[bool, list[tuple[int, int]]]]]) -> ClusterCache:
    """Nodes n0, n1, … whose cards of 80 GiB hold the given amounts (core and memory in quarters, about)."""
    state = ClusterCache(SETTINGS)
    for i, held in enumerate(nodes):
        name = f"n{i}"
        made = [b.card(j, healthy=healthy, node=name) for j, (healthy, _) in enumerate(held)]
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", made))
        for j, (_, pods) in enumerate(held):
            for k, (core, gib) in enumerate(pods):
                record = {
                    "vke.volcengine.com/assumed": "true",
                    "vke.volcengine.com/gpu-index-container-c": str(j),
                }
                raw = b.share(
                    f"{name}-{j}-{k}",
                    max(25 * core, 1) % 100 or 99,
                    (20 * gib + 1) << 10,
                    annotations=record,
                    node=name,
                )
                state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})
    return state


def test_filter_for_failed_pod_rejects_all_nodes() -> None:
    """The kubelet's eviction or a user can set its phase while kube-scheduler still has the old pod."""
    state = filled([[(True, [])]])
    raw = b.share("p", 10)
    raw["status"] = {**raw.get("status", {}), "phase": "Failed"}
    state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})
    known = state.gpu_pod(raw["metadata"]["uid"])
    assert known is not None
    filter_ = Filter(state, SETTINGS)
    found = filter_.filter(known, ["n0"])
    assert found.hopeless == {"n0": "the pod has failed"}
    assert found.kinds["the pod has failed"] is RejectionKind.BOUND_ALREADY
    assert filter_.scores(known, ["n0"]) == [0]


@given(st.lists(cards, min_size=1, max_size=4), containers, st.sampled_from([0, 1, 2]))
def test_property_filter_equals_engine(
    nodes: list[list[tuple[bool, list[tuple[int, int]]]]], asked: list[ContainerRequest], max_shares: int
) -> None:
    state = filled(nodes)
    scaled = tuple(
        ContainerRequest(f"c{i}", c.cards, c.core, 0 if c.whole else c.memory * 20 * b.GIB, c.whole)
        for i, c in enumerate(asked)
    )
    request = GpuRequest("mgpu", scaled, max_shares)
    names = [f"n{i}" for i in range(len(nodes))]
    found = Filter(state, SETTINGS).filter(GpuPod(Pod("default", "p", "u"), request), names)
    for name in names:
        said = assess(request, Node(name), state.node_snapshot(name, "").cards, SETTINGS)
        if isinstance(said, Placement):
            assert name in found.passed
        else:
            assert str(said) in (found.hopeless if said.hopeless else found.failed)[name]


def test_filter_follows_changes_of_labels_and_nodes() -> None:
    state = filled([[(True, [])], [(True, [])]])
    known = GpuPod(Pod("default", "p", "u"), None)
    raw = b.share("p")
    state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})
    known = state.gpu_pod("uid-p") or known
    filter_ = Filter(state, SETTINGS)
    assert filter_.filter(known, ["n0", "n1"]).passed == ["n0", "n1"]
    state.node_changed(b.node("n0", labels={"vke.node.gpu.schedule": "none"}))
    found = filter_.filter(known, ["n0", "n1"])
    assert found.passed == ["n1"]
    assert "is none" in found.hopeless["n0"]
    state.node_gone(b.node("n1"))
    assert filter_.filter(known, ["n0", "n1"]).passed == []
    state.node_changed(b.node("n2"))  # takes the row of n1
    state.device_changed(write_device(Node("n2"), "", b.cards(1, node="n2")))
    assert filter_.filter(known, ["n2", "n1"]).passed == ["n2"]


@pytest.mark.parametrize("count", [0, 1, 70])
def test_filter_accepts_any_number_of_nodes(count: int) -> None:
    state = filled([[(True, [])]] * count)
    raw = b.share("p")
    state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})
    known = state.gpu_pod("uid-p")
    assert known is not None
    names = [f"n{i}" for i in range(count)]
    found = Filter(state, SETTINGS).filter(known, [*names, "other"])
    assert found.passed == names
    assert list(found.hopeless) == ["other"]
