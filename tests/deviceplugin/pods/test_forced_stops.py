"""Containers of pods that were deleted by force are stopped some time after their objects have gone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.pods.container_runtime import ContainerRuntime
from deviceplugin.pods.gpu_pod import MIRROR
from deviceplugin.pods.receipts import Receipts
from deviceplugin.pods.remnants import STOP_SECONDS, ForcedStops
from mgpu.model.errors import RetryLater
from tests.builders import cards
from tests.deviceplugin.cri import serving
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.pods.test_remnants import Place, decided, delete_by_force, told, uid_of
from tests.waiting import until


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deviceplugin.pods.remnants.STOP_SECONDS", 0.5)
    monkeypatch.setattr("deviceplugin.pods.remnants._STOP_POLL_SECONDS", 0.2)


def hide(node: Node, running: set[str], name: str = "hidden") -> str:
    """A pod is deleted by force while its container runs on. Return its UID."""
    node.create(decided(name))
    node.runs(name)
    running.add(uid := uid_of(node, name))
    delete_by_force(node, name)
    return uid


@pytest.mark.usefixtures("prompt")
def test_container_of_pod_deleted_by_force_is_stopped_and_its_cards_are_free(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        node.create(decided("neighbour", "1"))
        node.runs("neighbour")
        cri.running.add(neighbour := uid_of(node, "neighbour"))
        uid = hide(node, cri.running, "p")
        node.create(decided("p"))
        node.runs("p")
        assert cri.stopped == [(f"of-{uid}", 0)]
        assert cri.running == {neighbour}
        until(lambda: not told(node))


@pytest.mark.usefixtures("prompt", "brief")
def test_stop_that_fails_is_reported_and_retried_while_the_cards_stay_held(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        cri.failing = True
        uid = hide(node, cri.running)
        events = "/api/v1/namespaces/default/events"
        (event,) = until(lambda: [e for e in node.api.get(events)["items"] if e["reason"] == "MgpuStop"])
        assert f"containers of the deleted pod {uid} are not stopped" in event["message"]
        assert "the shim does not answer" in event["message"]
        assert event["involvedObject"]["kind"] == "Node"
        node.create(decided("p"))
        until(lambda: node.waits("p"))
        cri.failing = False
        node.runs("p")


@pytest.mark.usefixtures("prompt")
def test_agent_that_starts_later_stops_what_was_deleted_before(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri:
        with node.agent():
            node.create(decided("hidden"))
            node.runs("hidden")
            cri.running.add(uid := uid_of(node, "hidden"))
        node.api.delete(f"{PODS}/hidden", {"gracePeriodSeconds": 0})
        assert not cri.stopped
        with node.agent():
            until(lambda: cri.stopped == [(f"of-{uid}", 0)])


class Stopping:
    """The runtime of `Place`, with calls to stop."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    async def stop_containers(self, uid: str) -> int:
        self.stopped.append(uid)
        return 1


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(folder, monkeypatch, terminationGracePeriodSeconds=1_000_000)
    place.runtime.running = {"uid-p"}
    return place


def stopped(place: Place, seconds: float, *, lists: bool = True, listed: Any = lambda: None) -> list[str]:
    """Return what is stopped, with the failures, that many seconds later. listed: what a new list brings."""

    class List:
        def refresh(self, seconds: float) -> bool:  # noqa: ARG002
            listed()
            return lists

    place.holds()
    place.now += seconds
    place.holds()
    runtime = Stopping()
    failures = asyncio.run(ForcedStops(place.remnants, runtime, List(), lambda _: None).stop_overdue())
    return [*runtime.stopped, *failures]


def test_pod_is_stopped_when_its_time_is_over_and_not_before(place: Place) -> None:
    place.pods.drop(place.raw)
    assert stopped(place, STOP_SECONDS - 1) == []
    assert stopped(place, 1) == ["uid-p"]


def test_api_server_that_does_not_list_the_pods_lets_nothing_be_stopped(place: Place) -> None:
    place.pods.drop(place.raw)
    (failure,) = stopped(place, STOP_SECONDS + 1, lists=False)
    assert "once the API server lists the pods again" in failure


def test_pod_that_a_new_list_names_is_not_stopped(place: Place) -> None:
    place.pods.drop(place.raw)
    assert stopped(place, STOP_SECONDS + 1, listed=lambda: place.pods.take(place.raw)) == []


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_pod_with_a_final_phase_is_stopped_only_after_its_object_has_gone(place: Place, phase: str) -> None:
    place.pods.take(ended := place.status(phase, "terminated"))
    assert stopped(place, 10 * STOP_SECONDS) == []
    place.pods.drop(ended)
    assert stopped(place, STOP_SECONDS - 1) == []
    assert stopped(place, 1) == ["uid-p"]


def test_static_pod_without_mirror_is_not_stopped(place: Place) -> None:
    place.raw["metadata"]["annotations"][MIRROR] = "a" * 32
    Receipts(place.folder).remove("uid-p")
    place.start()
    place.runtime.running = {"a" * 32}
    place.pods.drop(place.raw)
    assert stopped(place, 10 * STOP_SECONDS) == []


def test_static_pod_with_cards_of_another_plugin_is_not_stopped(place: Place) -> None:
    place.remnants.try_write_receipt("a" * 32, place.pods.all()[0].shares or (), cards(2))
    place.runtime.running = {"a" * 32}
    place.pods.drop(place.raw)
    assert stopped(place, 10 * STOP_SECONDS) == []


def test_pod_without_receipt_is_not_stopped(place: Place) -> None:
    place.runtime.running = {"uid-p", "uid-of-another"}
    assert stopped(place, 10 * STOP_SECONDS) == []


def test_missing_runtime_is_an_error_and_stops_nothing(folder: Path) -> None:
    with pytest.raises(RetryLater, match="there is no container runtime"):
        asyncio.run(ContainerRuntime(folder / "cri.sock").stop_containers("uid-p"))
