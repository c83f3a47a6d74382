"""The agent between a kubelet, a runtime and an API server: what containers get, and what the agent reports."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from deviceplugin.agent import Agent
from deviceplugin.event_loop import HANGING_SECONDS, UNRESPONSIVE_SECONDS
from mgpu.kube import Api, ApiError
from playground.kubelet import device_checkpoint
from tests.builders import CORE, MEMORY, container, pod, share
from tests.deviceplugin import node as nodes
from tests.deviceplugin import records
from tests.deviceplugin.cri import serving
from tests.deviceplugin.node import DEVICES, NODE, PODS, Node
from tests.deviceplugin.records import ASSUMED, RECORD
from tests.waiting import until

ALL_MEMORY, HALF_MEMORY = ("163840", "160Ki"), ("81920", "80Ki")
ONE_UNHEALTHY = [{"memory": "80Gi"}, {"memory": "80Gi", "healthy": False}]


def decided(name: str, card: str = "1", core: int = 50, **more: Any) -> dict[str, Any]:
    return records.decided(name, card, core, node="n1", **more)


def run(node: Node, *names: str) -> None:
    for name in names:
        node.create(decided(name))
        node.runs(name)


def restart_container(node: Node, name: str) -> None:
    uid = node.pod(name)["metadata"]["uid"]
    before = len(node.runtime.containers(uid))
    node.kubelet.restart_container("default", name, "c")
    until(lambda: len(node.runtime.containers(uid)) > before)


def restart_kubelet(node: Node, agent: Agent) -> None:
    node.kubelet.stop()
    until(agent.not_ready_reason)
    node.kubelet.start()
    until(lambda: not agent.not_ready_reason() and node.healthy_ids() == 200)


def events(node: Node, reason: str) -> list[dict[str, Any]]:
    return until(lambda: [e for e in node.api.list("/api/v1/events")[0] if e["reason"] == reason])


def held_ids(node: Node, name: str) -> set[str]:
    return set(node.kubelet.devices.ids(node.pod(name)["metadata"]["uid"], "c")[CORE])


def id_health(node: Node, ids: set[str]) -> set[str]:
    return {node.kubelet.devices.health(CORE, i) for i in ids}


def is_missing(node: Node, name: str) -> bool:
    try:
        node.pod(name)
    except ApiError as error:
        return error.status == 404
    return False


def test_node_reports_its_cards(node: Node) -> None:
    with node.agent():
        until(lambda: node.allocatable().get(CORE) == "200")
        until(lambda: node.allocatable().get(MEMORY) in ALL_MEMORY)
        device = until(node.device)
        assert [d["id"] for d in device["spec"]["devices"]] == ["GPU-n1-0", "GPU-n1-1"]
        assert device["metadata"]["ownerReferences"][0]["uid"] == node.api.get(NODE)["metadata"]["uid"]
        model = "node.koordinator.sh/gpu-model"
        until(lambda: node.api.get(NODE)["metadata"]["labels"].get(model) == "A100-SXM4-80GB")


def test_container_gets_the_cards_of_its_record(node: Node) -> None:
    with node.agent():
        run(node, "p")
        expected = {"MGPU_CARDS": "1", "MGPU_CORE_PERCENT": "50", "MGPU_MEMORY_BYTES": str(1 << 30)}
        assert node.env("p").items() >= {"NVIDIA_VISIBLE_DEVICES": "GPU-n1-1", **expected}.items()


def test_equal_pods_get_the_cards_of_their_own_records(node: Node) -> None:
    with node.agent():
        with node.kubelet.holding():
            for i in range(8):
                node.create(decided(f"p{i}", str(i % 2), core=10))
        for i in range(8):
            node.runs(f"p{i}")
            assert node.visible(f"p{i}") == f"GPU-n1-{i % 2}"


def test_each_container_of_a_pod_gets_its_own_cards(node: Node) -> None:
    raw = pod(
        "p",
        container("a", 20, 1024),
        container("b", 30, 1024),
        container("plain"),
        init=(container("i", 20, 1024),),
        node="n1",
        annotations={ASSUMED: "true", RECORD + "a": "0", RECORD + "b": "1", RECORD + "i": "1"},
    )
    with node.agent():
        node.create(raw)
        node.runs("p")
        assert [node.visible("p", c) for c in ("i", "a", "b")] == ["GPU-n1-1", "GPU-n1-0", "GPU-n1-1"]
        assert "MGPU_CARDS" not in node.env("p", "plain")


@pytest.mark.parametrize("is_agent_restarted", [False, True])
def test_container_waits_for_a_late_decision(node: Node, *, is_agent_restarted: bool) -> None:
    """The agent may be replaced between Allocate and PreStartContainer."""
    with ExitStack() as agent:
        agent.enter_context(node.agent())
        uid = node.create(share("p", node="n1"))["metadata"]["uid"]
        until(lambda: node.kubelet.devices.ids(uid, "c"))
        if is_agent_restarted:
            agent.close()
        node.decide("p", c="1")
        if is_agent_restarted:
            agent.enter_context(node.agent())
        node.runs("p")
        assert node.visible("p") == "GPU-n1-1"


def test_record_with_an_absent_card_is_refused_with_the_reason(node: Node) -> None:
    with node.agent():
        node.create(decided("p", "7"))
        assert "card 7, which this node does not have" in until(lambda: node.waits("p"))
        assert events(node, "MgpuStartRefused")
        node.decide("p", c="0")
        node.runs("p")


def test_unhealthy_card_is_reported_at_once_until_it_recovers(node: Node) -> None:
    with node.agent():
        run(node, "p")
        node.set_cards(ONE_UNHEALTHY)
        until(lambda: node.allocatable().get(CORE) == "100")
        until(lambda: [d["health"] for d in (node.device() or {})["spec"]["devices"]] == [True, False])
        until(lambda: node.allocatable().get(MEMORY) in HALF_MEMORY)
        assert id_health(node, held_ids(node, "p")) == {"Unhealthy"}
        node.create(decided("q"))
        assert "card 1 (GPU-n1-1) is unhealthy" in until(lambda: node.waits("q"))
        node.set_cards([{"count": 2, "memory": "80Gi"}])
        until(lambda: node.healthy_ids() == 200)
        node.runs("q")


def test_invalid_card_file_is_reported_and_the_cards_stay(node: Node) -> None:
    with node.agent() as agent:
        node.file.write_text("[")
        assert events(node, "MgpuCards")
        assert node.healthy_ids() == 200
        assert not agent.not_ready_reason()


def test_deleted_device_and_zeroed_capacity_are_written_again(node: Node) -> None:
    with node.agent():
        first = until(node.device)["metadata"]["uid"]
        node.api.delete(f"{DEVICES}/n1")
        until(lambda: (node.device() or {"metadata": {"uid": first}})["metadata"]["uid"] != first)
        node.api.patch(f"{NODE}/status", {"status": {"capacity": {MEMORY: "0"}}})
        until(lambda: node.allocatable().get(MEMORY) in ALL_MEMORY)


def test_fields_of_other_clients_on_the_device_stay(node: Node) -> None:
    rdma = {"type": "rdma", "id": "mlx5_0", "minor": 0, "health": True}
    with node.agent():
        own = until(node.device)["spec"]["devices"]
        metadata = {"annotations": {"a": "1"}, "labels": {"l": "2"}}
        node.api.patch(f"{DEVICES}/n1", {"metadata": metadata, "spec": {"devices": [rdma, *own]}})
        node.set_cards(ONE_UNHEALTHY)

        def reported() -> Any:
            device = until(node.device)
            return None if all(entry["health"] for entry in device["spec"]["devices"]) else device

        device = until(reported)
        assert device["metadata"]["annotations"]["a"] == "1"
        assert device["metadata"]["labels"] == {"l": "2", "mgpu.io/isolation": "none"}
        assert rdma in device["spec"]["devices"]
        assert len(device["spec"]["devices"]) == 3


def test_kubelet_restart_changes_no_cards(node: Node) -> None:
    with node.agent() as agent:
        run(node, "p")
        restart_kubelet(node, agent)
        restart_container(node, "p")
        assert node.visible("p") == "GPU-n1-1"
        node.create(decided("q", "0"))
        node.runs("q")
        assert node.visible("q") == "GPU-n1-0"


def test_agent_restart_changes_no_cards_and_removes_files_of_deleted_pods(node: Node) -> None:
    with node.agent():
        run(node, "p", "gone")
    assert not (node.folder / "device-plugins" / "mgpu-core.sock").exists()
    (own, other) = node.cdi_files()
    strange = own.with_name(own.name.replace(own.name.split("_")[1], "unknown"))
    strange.write_bytes(other.read_bytes())
    node.api.delete(f"{PODS}/gone")
    until(lambda: is_missing(node, "gone"))
    with serving(node.folder / "cri.sock"), node.agent():
        until(lambda: len(node.cdi_files()) == 1)
        restart_container(node, "p")
        assert node.visible("p") == "GPU-n1-1"
        node.api.delete(f"{PODS}/p")
        until(lambda: not node.cdi_files())


def test_agent_starts_with_damaged_files_in_the_cdi_folder(node: Node) -> None:
    folder = node.folder / "cdi"
    folder.mkdir(exist_ok=True)
    (folder / "mgpu_a_b_c_d.json").write_text("{}")
    (folder / "mgpu_a_receipt").write_text('{"uid": "a", "kubelets_uid": "a", "grace": 1, "shares": [{"card": []}]}')
    with node.agent():
        run(node, "p")


def test_fewer_ids_than_before_include_those_that_pods_hold(node: Node) -> None:
    """A kubelet that restarts would fail a pod whose ids are gone."""
    with node.agent():
        node.create(decided("p", "0", core=60))
        node.runs("p")
        held = held_ids(node, "p")
    node.set_cards([{"memory": "80Gi"}])
    with node.agent():
        assert node.healthy_ids() == 100
        assert id_health(node, held) == {"Healthy"}


def test_container_restarts_on_its_cards_while_no_agent_runs(node: Node) -> None:
    """The kubelet has restarted too. It does not call PreStartContainer until the plugin is registered again."""
    with node.agent():
        run(node, "p")
    node.kubelet.stop()
    node.kubelet.start()
    until(lambda: "'health': 'Unknown'" in str(node.pod("p")["status"]))
    restart_container(node, "p")
    assert node.visible("p") == "GPU-n1-1"
    with node.agent():
        restart_container(node, "p")
        assert node.visible("p") == "GPU-n1-1"


def test_node_reboot_gives_each_pod_its_cards(node: Node) -> None:
    """There is no checkpoint, no CDI file and no container any more. The pods are admitted when the agent is ready."""
    record = {ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "1"}
    two = pod("q", container("c", 20, 1024), init=(container("i", 20, 1024),), node="n1", annotations=record)
    with node.agent():
        node.create(two)
        run(node, "p")
        node.runs("q")
    node.kubelet.stop()
    node.runtime.reboot()
    for file in [node.folder / "device-plugins" / device_checkpoint.FILE, *node.cdi_files()]:
        file.unlink()
    with ExitStack() as agent:
        with node.kubelet.holding():
            node.kubelet.start()
            agent.enter_context(node.agent())
            # Without a checkpoint, the kubelet has set the capacity to zero.
            until(lambda: node.allocatable().get(MEMORY) in ALL_MEMORY)
        for name in ("p", "q"):
            uid = node.pod(name)["metadata"]["uid"]
            until(lambda uid=uid: (c := node.runtime.latest(uid, "c")) and c.running)  # type: ignore[misc]
        visible = [node.visible("p"), node.visible("q", "i"), node.visible("q", "c")]
        assert visible == ["GPU-n1-1", "GPU-n1-1", "GPU-n1-0"]


def test_overtaken_checkpoint_is_written_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two writers of the kubelet, the one with the state before the allocation may come last."""
    lost: list[bool] = []
    write = device_checkpoint.write

    def overtaken(path: Any, entries: Any, registered: Any) -> None:
        held = list(entries)
        if held and not lost:
            lost.append(True)
            held = []
        write(path, held, registered)

    with node.agent():
        monkeypatch.setattr(device_checkpoint, "write", overtaken)
        run(node, "p")
        assert lost
        assert node.visible("p") == "GPU-n1-1"


def test_start_beyond_the_capacity_of_a_card_is_refused(node: Node) -> None:
    """Each of the records is valid by itself, as of two schedulers."""
    with node.agent():
        node.create(decided("p", core=60))
        node.runs("p")
        node.create(decided("q", core=60))
        why = until(lambda: node.waits("q"))
        assert "card 1 (GPU-n1-1) has insufficient capacity: core 60% requested, 40% free; held by default/p" in why
        assert events(node, "MgpuStartRefused")[0]["involvedObject"]["name"] == "q"
        node.api.delete(f"{PODS}/p")
        node.runs("q")


def test_without_cdi_only_decided_pods_start(node: Node) -> None:
    with node.agent(cdi=False):
        run(node, "p")
        assert node.visible("p") == "GPU-n1-1"
        node.create(share("q", node="n1"))
        until(lambda: node.pod("q")["status"]["phase"] == "Failed")
        assert "no cards have been decided" in node.pod("q")["status"]["message"]
        assert not node.cdi_files()


def test_without_cdi_equal_pods_exchange_their_records(node: Node) -> None:
    with node.agent(cdi=False):
        with node.kubelet.holding():
            # The agent assumes the opposite order.
            for i in reversed(range(6)):
                node.create(decided(f"p{i}", str(i % 2), core=10))
        for i in range(6):
            node.runs(f"p{i}")

        def recorded(name: str) -> str:
            return "GPU-n1-" + str(node.pod(name)["metadata"]["annotations"][RECORD + "c"])

        until(lambda: all(recorded(f"p{i}") == node.visible(f"p{i}") for i in range(6)))
        assert sorted(node.visible(f"p{i}") for i in range(6)) == ["GPU-n1-0"] * 3 + ["GPU-n1-1"] * 3


class FrozenApi(Api):
    """An API server that accepts requests and never answers them while `frozen` is set. Open watches go on."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.frozen = threading.Event()
        self.thawed = threading.Event()
        self.requests: list[str] = []

    def _send(self, method: str, path: str, *arguments: Any, **more: Any) -> Any:
        if self.frozen.is_set():
            self.requests.append(f"{method} {path}")
            self.thawed.wait(30)
        return super()._send(method, path, *arguments, **more)


@contextmanager
def frozen_agent(node: Node, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[FrozenApi]:
    apis: list[FrozenApi] = []
    api_of: Callable[..., Api] = nodes.api_of

    def frozen_api_of(url: str, **more: Any) -> Api:
        api = api_of(url, **more)
        apis.append(FrozenApi(api._server))
        api.close()
        return apis[-1]

    monkeypatch.setattr(nodes, "api_of", frozen_api_of)
    with node.agent(**settings):
        try:
            yield apis[0]
        finally:
            apis[0].thawed.set()


@pytest.mark.parametrize("cdi", [True, False], ids=["cdi", "no cdi"])
def test_calls_of_the_kubelet_do_not_wait_for_the_api_server(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, cdi: bool
) -> None:
    with frozen_agent(node, monkeypatch, cdi=cdi) as api:
        with node.kubelet.holding():
            for i in range(4):
                node.create(decided(f"p{i}", str(i % 2), core=10))
            node.create(decided("wrong", "7"))
            api.frozen.set()
        for i in range(4):
            node.runs(f"p{i}")
        if cdi:
            until(lambda: "card 7, which this node does not have" in node.waits("wrong"))
            until(lambda: api.requests)
        assert not api.thawed.is_set()


def test_ended_agent_leaves_no_thread_that_posts_events(node: Node) -> None:
    """The process creates another agent after each handover."""

    def threads() -> int:
        return sum(thread.name == "events" for thread in threading.enumerate())

    before = threads()
    with node.agent():
        assert threads() == before + 1
    until(lambda: threads() == before)


def test_blocked_event_loop_makes_the_agent_unready_and_then_unhealthy(node: Node) -> None:
    with node.agent() as agent:
        until(lambda: agent._heartbeat.silence() < 0.1)
        now = time.monotonic()
        agent._heartbeat._clock = lambda: now + UNRESPONSIVE_SECONDS + 2
        assert agent.not_ready_reason() == "the event loop has not run for 5 s"
        assert not agent.unhealthy_reason()
        agent._heartbeat._clock = lambda: now + HANGING_SECONDS + 2
        assert agent.unhealthy_reason() == "the event loop has not run for 32 s"


def test_agent_stays_ready_if_a_later_report_is_refused(node: Node) -> None:
    """Otherwise all nodes would become unready if the API server refused a field that all agents report."""
    with node.agent() as agent:

        def refuse(*_: object) -> None:
            raise ApiError(403, "Forbidden", "no right")

        agent._reporter._api.patch = refuse  # type: ignore[assignment, method-assign]
        node.set_cards(ONE_UNHEALTHY)
        assert until(agent.unreported_reason) == "403 Forbidden: no right"
        assert not agent.not_ready_reason()
