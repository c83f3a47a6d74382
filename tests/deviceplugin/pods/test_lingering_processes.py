"""Cards of pods that were deleted by force while their containers run."""

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
from tests.deviceplugin.records import decided
from tests.waiting import until

BUSY = (MigCard("GPU-n1-0", capable=False, busy=True), MigCard("GPU-n1-1", capable=False))


def ran(name: str, on: str, **more: Any) -> dict[str, Any]:
    raw = decided(name, on, **more)
    rows = [{"name": "c", "containerID": "x", "state": {"running": {}}}]
    return {**raw, "status": {**raw["status"], "containerStatuses": rows}}


class Place:
    """A node's pods, and what NVML says; `p` was there, and has been deleted by force."""

    def __init__(self) -> None:
        self.pods = NodePods(load_settings(), lambda: None)
        self.said: Sequence[MigCard] | Exception = BUSY
        self.leftovers = LingeringProcesses(self.pods, self)
        self.pods.take(ran("p", "0"))
        self.pods.drop(ran("p", "0"))

    def read(self) -> Sequence[MigCard]:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def start(self, name: str, on: str) -> None:
        if self.pods.by_uid(f"uid-{name}") is None:
            self.pods.take(decided(name, on))
        known = self.pods.by_uid(f"uid-{name}")
        assert known is not None
        asyncio.run(self.leftovers.wait_until_ended(known, cards(2), 0.0))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(lingering_processes, "_ANSWER_SECONDS", 60.0)
    return Place()


def test_start_waits_until_the_process_of_a_vanished_pod_has_ended(place: Place) -> None:
    why = r"default/q: processes of default/p, which was deleted by force, run on card 0 \(GPU-n1-0\)"
    with pytest.raises(Refused, match=why):
        place.start("q", "0")
    place.start("r", "1")
    place.said = ()
    place.start("q", "0")
    place.said = BUSY  # by now they are its own
    place.start("q", "0")


def test_pod_of_another_namespace_that_was_deleted_by_force_is_not_named(place: Place) -> None:
    place.pods.take(decided("q", "0", namespace="other"))
    with pytest.raises(Refused, match=r"^other/q: processes of a pod of another namespace, which"):
        place.start("q", "0")


def test_start_on_a_shared_card_does_not_wait_for_processes(place: Place) -> None:
    place.pods.take(ran("other", "0"))
    place.start("q", "0")


def test_pod_that_runs_already_does_not_wait_for_its_own_processes(place: Place) -> None:
    place.pods.take(ran("q", "0"))
    place.start("q", "0")


def test_vanished_occupy_pod_leaves_no_process(place: Place) -> None:
    place.pods.forget_vanished("uid-p")
    raw = occupy_pod(card=0)
    rows = [{"name": "occupy", "containerID": "x", "state": {"running": {}}}]
    raw["status"] = {**raw["status"], "containerStatuses": rows}
    place.pods.take(raw)
    place.pods.drop(raw)
    assert place.pods.vanished_pods()
    place.start("q", "0")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pod_that_had_ended_leaves_no_process(place: Place, phase: str) -> None:
    place.pods.forget_vanished("uid-p")
    place.pods.take(ran("e", "0"))
    place.pods.drop(ran("e", "0", phase=phase))
    place.start("q", "0")


def test_start_does_not_wait_where_nvml_does_not_answer(place: Place) -> None:
    place.said = RetryLater("NVML: driver not loaded")
    place.start("q", "0")


def test_process_that_runs_for_long_after_the_pod_is_ignored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering_processes, "_LONGEST_SECONDS", -1.0)
    place.start("q", "0")
    assert not place.pods.vanished_pods()


def test_container_waits_for_a_process_that_a_vanished_pod_left_on_its_card(node: Node) -> None:
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
