"""Starts that wait for processes of pods that were deleted by force."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from deviceplugin.mig.mig_driver import MigCard
from deviceplugin.pods import lingering_processes
from deviceplugin.pods.identity import Refused
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater
from mgpu.settings import load_settings
from playground.nvml_state import deregister, register, state_file
from tests.builders import cards, occupy_pod
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.records import decided, started
from tests.waiting import until

BUSY = (MigCard("GPU-n1-0", capable=False, busy=True), MigCard("GPU-n1-1", capable=False))


def running(name: str, card: str, **more: Any) -> dict[str, Any]:
    return started(decided(name, card, **more))


class VanishedPod:
    """The pods of a node, of which `p` was deleted by force while it ran, and the answer of NVML."""

    def __init__(self) -> None:
        self.pods = NodePods(load_settings(), lambda: None)
        self.answer: Sequence[MigCard] | Exception = BUSY
        self.lingering = LingeringProcesses(self.pods, self)
        self.pods.take(running("p", "0"))
        self.pods.drop(running("p", "0"))

    def read(self) -> Sequence[MigCard]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def start(self, name: str, card: str) -> None:
        if self.pods.by_uid(f"uid-{name}") is None:
            self.pods.take(decided(name, card))
        gpu_pod = self.pods.by_uid(f"uid-{name}")
        assert gpu_pod is not None
        asyncio.run(self.lingering.wait_until_ended(gpu_pod, cards(2), 0.0))


@pytest.fixture
def vanished(monkeypatch: pytest.MonkeyPatch) -> VanishedPod:
    monkeypatch.setattr(lingering_processes, "_ANSWER_SECONDS", 60.0)
    return VanishedPod()


def test_start_waits_until_the_process_of_a_vanished_pod_has_ended(vanished: VanishedPod) -> None:
    why = r"default/q: processes of default/p, which was deleted by force, run on card 0 \(GPU-n1-0\)"
    with pytest.raises(Refused, match=why):
        vanished.start("q", "0")
    vanished.start("r", "1")
    vanished.answer = ()
    vanished.start("q", "0")
    vanished.answer = BUSY  # now the processes may be its own
    vanished.start("q", "0")


def test_vanished_pod_of_another_namespace_is_not_named(vanished: VanishedPod) -> None:
    vanished.pods.take(decided("q", "0", namespace="other"))
    with pytest.raises(Refused, match=r"^other/q: processes of a pod of another namespace, which"):
        vanished.start("q", "0")


def test_start_on_a_shared_card_does_not_wait_for_processes(vanished: VanishedPod) -> None:
    vanished.pods.take(running("other", "0"))
    vanished.start("q", "0")


def test_running_pod_does_not_wait_for_its_own_processes(vanished: VanishedPod) -> None:
    vanished.pods.take(running("q", "0"))
    vanished.start("q", "0")


def test_vanished_occupy_pod_leaves_no_process(vanished: VanishedPod) -> None:
    vanished.pods.forget_vanished("uid-p")
    raw = started(occupy_pod(card=0), "occupy")
    vanished.pods.take(raw)
    vanished.pods.drop(raw)
    assert vanished.pods.vanished_pods()
    vanished.start("q", "0")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pod_that_had_ended_leaves_no_process(vanished: VanishedPod, phase: str) -> None:
    vanished.pods.forget_vanished("uid-p")
    vanished.pods.take(running("e", "0"))
    vanished.pods.drop(running("e", "0", phase=phase))
    vanished.start("q", "0")


def test_start_does_not_wait_if_nvml_does_not_answer(vanished: VanishedPod) -> None:
    vanished.answer = RetryLater("NVML: driver not loaded")
    vanished.start("q", "0")


def test_process_that_never_ends_is_ignored_after_a_time(
    vanished: VanishedPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering_processes, "_LONGEST_SECONDS", -1.0)
    vanished.start("q", "0")
    assert not vanished.pods.vanished_pods()


def test_container_waits_for_a_process_of_a_vanished_pod(node: Node) -> None:
    processes = state_file(node.file)
    with node.agent():
        node.create(decided("p", "1", node="n1"))
        node.runs("p")
        register(processes, "GPU-n1-1", 4321)
        node.api.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
        node.create(decided("q", "1", node="n1"))
        uid = node.pod("q")["metadata"]["uid"]
        until(lambda: node.kubelet.devices.ids(uid, "c"))
        node.create(decided("r", "0", node="n1"))
        node.runs("r")
        assert node.pod("q")["status"]["phase"] == "Pending"
        deregister(processes, "GPU-n1-1", 4321)
        node.runs("q")
