"""The agent's metrics."""

from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from deviceplugin.metrics import REGISTRY, NodeCards
from deviceplugin.usage.usage_metrics import UsageMetrics
from playground import gpu_processes
from playground.nvml_state import state_file
from tests.builders import cards
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.node import Node
from tests.deviceplugin.records import decided
from tests.waiting import until

GIB = 1 << 30
CARD = {"node": "n1", "model": "A100-SXM4-80GB"}
ONE = {**CARD, "index": "1", "uuid": "GPU-n1-1"}
ON_ONE = {"node": "n1", "index": "1", "uuid": "GPU-n1-1"}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def corrections(what: str) -> float:
    return value("mgpu_identity_corrections_total", corrected=what)


def test_metrics_report_cards_and_answers_to_the_kubelet(node: Node) -> None:
    def answers() -> list[float]:
        allocate = sum(value("mgpu_allocate_seconds_count", result=result) for result in ("granted", "void"))
        return [allocate, value("mgpu_prestart_seconds_count", result="granted")]

    before = answers()
    with node.agent(usageSeconds=0.02) as agent:
        registry = CollectorRegistry()
        registry.register(NodeCards(lambda: agent))
        registry.register(UsageMetrics(lambda: agent, 8))
        sample = registry.get_sample_value
        node.create(decided("p", "1", core=30, node="n1"))
        node.runs("p")
        assert all(now > then for now, then in zip(answers(), before, strict=True))
        assert sample("mgpu_card_core_used_ratio", ONE) == 0.3
        assert sample("mgpu_card_core_used_ratio", {**CARD, "index": "0", "uuid": "GPU-n1-0"}) == 0
        assert sample("mgpu_card_core_capacity_ratio", ONE) == 1
        assert sample("mgpu_card_memory_used_bytes", ONE) == GIB
        assert sample("mgpu_card_memory_capacity_bytes", ONE) == 80 * GIB
        assert sample("mgpu_agent_watch_synced") == 1
        until(lambda: sample("mgpu_agent_ready") == 1)
        _use_more_than_its_share(node, "p")
        of_p = {**ON_ONE, "namespace": "default", "pod": "p", "container": "c"}
        until(lambda: sample("mgpu_container_memory_used_bytes", of_p) == 3 * GIB)
        assert sample("mgpu_container_memory_limit_bytes", of_p) == GIB
        assert sample("mgpu_card_memory_in_use_bytes", ONE) == 3 * GIB
        (event,) = until(lambda: _events(node, "MgpuOverShare"))
        assert "container c uses 3.0 GiB of card 1 (GPU-n1-1), its share is 1.0 GiB" in event["message"]
        one = {"memory": "80Gi", "model": CARD["model"]}
        node.set_cards([one, {**one, "healthy": False}])
        until(lambda: sample("mgpu_card_healthy", ONE) == 0)


def _use_more_than_its_share(node: Node, pod: str) -> None:
    (run,) = (container for container in node.runtime.containers() if container.pod == pod)
    state = state_file(node.file)
    gpu_processes.write_proc(state, run.pid, run.cgroup)
    gpu_processes.use(state, "GPU-n1-1", run.pid, memory=3 * GIB)


def _events(node: Node, reason: str) -> list[Any]:
    events = node.api.get("/api/v1/namespaces/default/events")["items"]
    return [event for event in events if event["reason"] == reason]


def test_answer_for_another_pod_counts_as_corrected_answer(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path)
    fake_node.pods.take(decided("p", "1"))
    before = corrections("answer")
    answer = fake_node.allocate(["1", "2"])  # assumed to be for p
    fake_node.pods.take(decided("q", "0"))
    fake_node.note(answer, ["1", "2"], "uid-q")
    fake_node.start(["1", "2"])
    fake_node.start(["1", "2"])  # the container starts again
    assert fake_node.visible(answer) == "GPU-n1-0"
    assert corrections("answer") == before + 1


def test_exchange_counts_as_corrected_records(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.01)
    fake_node.cards = cards(2)
    for name, on in (("p", "0"), ("q", "1")):
        fake_node.pods.take(decided(name, on))
    before = corrections("records")
    for ids, uid in ((["1", "2"], "uid-q"), (["3", "4"], "uid-p")):
        fake_node.admit(ids, uid)
    for ids in (["1", "2"], ["3", "4"]):
        fake_node.start(ids)
    assert corrections("records") == before + 1  # by then the records of the other pod agree
