"""Stopping the containers of pods that were deleted by force."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.pods.container_runtime import ContainerRuntime
from deviceplugin.pods.remnants import STOP_SECONDS, ForcedStops
from mgpu.model.errors import RetryLater
from tests.builders import cards
from tests.deviceplugin.cri import serving
from tests.deviceplugin.node import Node
from tests.deviceplugin.pods.test_remnants import STATIC_UID, RunningPod, decided, delete_by_force, reported, run
from tests.waiting import until


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deviceplugin.pods.remnants.STOP_SECONDS", 0.5)
    monkeypatch.setattr("deviceplugin.pods.remnants._STOP_POLL_SECONDS", 0.2)


@pytest.mark.usefixtures("soon")
def test_container_of_a_pod_deleted_by_force_is_stopped(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        neighbour = run(node, cri, "neighbour", "1")
        uid = run(node, cri, "p")
        delete_by_force(node, "p")
        node.create(decided("p"))
        node.runs("p")
        assert cri.stopped == [(f"of-{uid}", 0)]
        assert cri.running == {neighbour}
        until(lambda: not reported(node))


@pytest.mark.usefixtures("soon", "brief")
def test_failed_stop_is_reported_and_retried(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        cri.failing = True
        uid = run(node, cri, "hidden")
        delete_by_force(node, "hidden")
        events = "/api/v1/namespaces/default/events"
        (event,) = until(lambda: [e for e in node.api.get(events)["items"] if e["reason"] == "MgpuStop"])
        assert f"containers of the deleted pod {uid} are not stopped" in event["message"]
        assert "the shim does not answer" in event["message"]
        assert event["involvedObject"]["kind"] == "Node"
        node.create(decided("p"))
        until(lambda: node.waits("p"))
        cri.failing = False
        node.runs("p")


@pytest.mark.usefixtures("soon")
def test_pod_deleted_while_no_agent_runs_is_stopped_later(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri:
        with node.agent():
            uid = run(node, cri, "hidden")
        delete_by_force(node, "hidden")
        assert not cri.stopped
        with node.agent():
            until(lambda: cri.stopped == [(f"of-{uid}", 0)])


class FakeRuntime:
    """A runtime that stops containers."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    async def stop_containers(self, uid: str) -> int:
        self.stopped.append(uid)
        return 1


@pytest.fixture
def running_pod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunningPod:
    running_pod = RunningPod(folder, monkeypatch, terminationGracePeriodSeconds=1_000_000)
    running_pod.runtime.running = {"uid-p"}
    return running_pod


def stopped(running_pod: RunningPod, seconds: float, *, lists: bool = True, listed: Any = lambda: None) -> list[str]:
    """Return the pods that are stopped after `seconds`, and the failures.

    Args:
        lists: whether the API server lists the pods.
        listed: called when the pods are listed.
    """

    class FakePodList:
        def refresh(self, seconds: float) -> bool:  # noqa: ARG002
            listed()
            return lists

    running_pod.holds()
    running_pod.now += seconds
    running_pod.holds()
    runtime = FakeRuntime()
    failures = asyncio.run(ForcedStops(running_pod.remnants, runtime, FakePodList(), lambda _: None).stop_overdue())
    return [*runtime.stopped, *failures]


def test_pod_is_stopped_after_the_stop_time(running_pod: RunningPod) -> None:
    running_pod.pods.drop(running_pod.raw)
    assert stopped(running_pod, STOP_SECONDS - 1) == []
    assert stopped(running_pod, 1) == ["uid-p"]


def test_nothing_is_stopped_if_the_pods_cannot_be_listed(running_pod: RunningPod) -> None:
    running_pod.pods.drop(running_pod.raw)
    (failure,) = stopped(running_pod, STOP_SECONDS + 1, lists=False)
    assert "once the API server lists the pods again" in failure


def test_pod_in_the_new_list_is_not_stopped(running_pod: RunningPod) -> None:
    running_pod.pods.drop(running_pod.raw)
    assert stopped(running_pod, STOP_SECONDS + 1, listed=lambda: running_pod.pods.take(running_pod.raw)) == []


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_pod_with_a_final_phase_is_stopped_only_after_its_deletion(running_pod: RunningPod, phase: str) -> None:
    running_pod.pods.take(ended := running_pod.status(phase, "terminated"))
    assert stopped(running_pod, 10 * STOP_SECONDS) == []
    running_pod.pods.drop(ended)
    assert stopped(running_pod, STOP_SECONDS - 1) == []
    assert stopped(running_pod, 1) == ["uid-p"]


def test_static_pod_without_mirror_is_not_stopped(running_pod: RunningPod) -> None:
    running_pod.make_static()
    running_pod.pods.drop(running_pod.raw)
    assert stopped(running_pod, 10 * STOP_SECONDS) == []


def test_static_pod_with_cards_of_another_plugin_is_not_stopped(running_pod: RunningPod) -> None:
    running_pod.remnants.try_write_receipt(STATIC_UID, running_pod.pods.all()[0].shares or (), cards(2))
    running_pod.runtime.running = {STATIC_UID}
    running_pod.pods.drop(running_pod.raw)
    assert stopped(running_pod, 10 * STOP_SECONDS) == []


def test_pod_without_receipt_is_not_stopped(running_pod: RunningPod) -> None:
    running_pod.runtime.running = {"uid-p", "uid-of-another"}
    assert stopped(running_pod, 10 * STOP_SECONDS) == []


def test_missing_runtime_raises_retry_later(folder: Path) -> None:
    with pytest.raises(RetryLater, match="there is no container runtime"):
        asyncio.run(ContainerRuntime(folder / "cri.sock").stop_containers("uid-p"))
