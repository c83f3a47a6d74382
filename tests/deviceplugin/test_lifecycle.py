"""Every restart is survived: the agent's, the kubelet's, the node's; and what may not run does not."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from deviceplugin.agent import Agent
from mgpu.kube import Api
from playground.kubelet import device_checkpoint
from tests.builders import MEMORY, container, pod, share
from tests.deviceplugin import node as nodes
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.records import ASSUMED, RECORD
from tests.waiting import until


def decided(name: str, card: str = "1", **more: Any) -> dict[str, Any]:
    return share(name, node="n1", annotations={ASSUMED: "true", RECORD + "c": card}, **more)


def restarted(node: Node, name: str, container_name: str = "c") -> None:
    """The container ends, and runs again."""
    uid = node.pod(name)["metadata"]["uid"]
    before = len(node.runtime.containers(uid))
    node.kubelet.restart_container("default", name, container_name)
    until(lambda: len(node.runtime.containers(uid)) > before)


def stopped_kubelet(node: Node, agent: Agent) -> None:
    node.kubelet.stop()
    until(agent.not_ready_reason)


def test_containers_start_again_after_a_kubelet_restart(node: Node) -> None:
    with node.agent() as agent:
        node.create(decided("p"))
        node.runs("p")
        stopped_kubelet(node, agent)
        node.kubelet.start()
        until(lambda: not agent.not_ready_reason() and node.healthy_ids() == 200)
        restarted(node, "p")
        assert node.visible("p") == "GPU-n1-1"


def test_while_the_agent_is_away_a_container_starts_again_on_its_cards(node: Node) -> None:
    """The kubelet restarted too: it does not call PreStartContainer until the plugin is back."""
    with node.agent():
        node.create(decided("p"))
        node.runs("p")
    node.kubelet.stop()
    node.kubelet.start()
    # Since it has taken the pod up again, it says that it knows nothing of the ids' health.
    until(lambda: "'health': 'Unknown'" in str(node.pod("p")["status"]))
    restarted(node, "p")
    assert node.visible("p") == "GPU-n1-1"
    with node.agent():
        restarted(node, "p")
        assert node.visible("p") == "GPU-n1-1"


def test_a_pod_that_was_admitted_before_an_upgrade_starts_after_it(node: Node) -> None:
    """The agent goes between Allocate and PreStartContainer."""
    with node.agent():
        node.create(share("p", node="n1"))
        uid = node.pod("p")["metadata"]["uid"]
        until(lambda: node.kubelet.devices.ids(uid, "c"))
    node.decide("p", c="1")
    with node.agent():
        node.runs("p")
        assert node.visible("p") == "GPU-n1-1"


def test_a_node_that_comes_up_again_gives_every_pod_its_cards(node: Node) -> None:
    """No checkpoint, no CDI files, no container; the pods are the same. They are admitted when the agent is there."""
    record = {ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "1"}
    two = pod("q", container("c", 20, 1024), init=(container("i", 20, 1024),), node="n1", annotations=record)
    with node.agent():
        node.create(decided("p"))
        node.create(two)
        node.runs("p")
        node.runs("q")
    node.kubelet.stop()
    node.runtime.reboot()
    for file in [node.folder / "device-plugins" / device_checkpoint.FILE, *node.cdi_files()]:
        file.unlink()
    with ExitStack() as agent:
        with node.kubelet.holding():
            node.kubelet.start()
            agent.enter_context(node.agent())
            # The kubelet has set to zero what it did not find in a checkpoint.
            until(lambda: node.allocatable().get(MEMORY) in ("163840", "160Ki"))
        for name, last in (("p", "c"), ("q", "c")):
            uid = node.pod(name)["metadata"]["uid"]
            until(lambda uid=uid, last=last: (c := node.runtime.latest(uid, last)) and c.running)  # type: ignore[misc]
        seen = [node.visible("p"), node.visible("q", "i"), node.visible("q", "c")]
        assert seen == ["GPU-n1-1", "GPU-n1-1", "GPU-n1-0"]


def test_files_of_a_pod_whose_deletion_nobody_saw_go(node: Node) -> None:
    with node.agent():
        node.create(decided("p"))
        node.runs("p")
    (file,) = node.cdi_files()
    copy = file.with_name(file.name.replace(file.name.split("_")[1], "gone"))
    copy.write_bytes(file.read_bytes())
    with node.agent():
        until(lambda: node.cdi_files() == [file])


def test_a_checkpoint_that_was_overtaken_is_written_anew(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers of the kubelet: the state from before the allocation is the one that stays in the file."""
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
        node.create(decided("p"))
        node.runs("p")
        assert lost
        assert node.visible("p") == "GPU-n1-1"


def test_a_card_is_never_over_its_capacity(node: Node) -> None:
    """Two schedulers, say: both records are in order, each for itself."""
    with node.agent():
        node.create(decided("p", "1", core=60))
        node.runs("p")
        node.create(decided("q", "1", core=60))
        why = until(lambda: node.waits("q"))
        assert "card 1 (GPU-n1-1) has no room: core 60% asked, 40% free; held by default/p" in why
        events = until(lambda: [e for e in node.api.list("/api/v1/events")[0] if e["reason"] == "MgpuStartRefused"])
        assert events[0]["involvedObject"]["name"] == "q"
        node.api.delete(f"{PODS}/p")
        node.runs("q")


def test_equal_pods_without_cdi_have_their_records_exchanged(node: Node) -> None:
    with node.agent(cdi=False):
        with node.kubelet.holding():
            # The other way round than this agent takes them.
            for i in reversed(range(6)):
                node.create(decided(f"p{i}", str(i % 2), core=10))
        for i in range(6):
            node.runs(f"p{i}")

        def said(name: str) -> str:
            return "GPU-n1-" + str(node.pod(name)["metadata"]["annotations"][RECORD + "c"])

        until(lambda: all(said(f"p{i}") == node.visible(f"p{i}") for i in range(6)))
        seen = [node.visible(f"p{i}") for i in range(6)]
        assert sorted(seen) == ["GPU-n1-0"] * 3 + ["GPU-n1-1"] * 3


class Frozen(Api):
    """An API server that takes requests and never answers, from `freeze` on; a watch that is open stays so."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.frozen, self.thaw = threading.Event(), threading.Event()
        self.asked: list[str] = []

    def _send(self, method: str, path: str, *arguments: Any, **more: Any) -> Any:
        if self.frozen.is_set():
            self.asked.append(f"{method} {path}")
            self.thaw.wait(30)
        return super()._send(method, path, *arguments, **more)


@contextmanager
def frozen_agent(node: Node, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Frozen]:
    made: list[Frozen] = []
    plain: Callable[..., Api] = nodes.api_of

    def frozen(url: str, **more: Any) -> Api:
        api = plain(url, **more)
        made.append(Frozen(api._configuration))
        api.close()
        return made[-1]

    monkeypatch.setattr(nodes, "api_of", frozen)
    with node.agent(**settings):
        try:
            yield made[0]
        finally:
            made[0].thaw.set()


@pytest.mark.parametrize("cdi", [True, False], ids=["cdi", "no cdi"])
def test_no_call_of_the_kubelet_waits_for_the_api_server(
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
            until(lambda: api.asked)
        assert not api.thaw.is_set()
