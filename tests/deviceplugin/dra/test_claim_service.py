"""The sockets and services that the kubelet uses: registration, calls for claims, health, and the handover."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.dra.claim_records import ClaimRecord, PreparedDevice
from deviceplugin.dra.claim_registration import (
    ClaimRegistration,
    registration_socket,
    remove_leftovers,
    service_socket,
)
from deviceplugin.dra.claim_service import ClaimService
from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.identity import Refused
from mgpu.model.cards import Card
from proto import dra_health_pb2 as health_api
from proto import dra_health_pb2_grpc as health_services
from proto import dra_pb2 as api
from proto import dra_pb2_grpc as services
from proto import pluginregistration_pb2 as registration_api
from proto import pluginregistration_pb2_grpc as registration_services
from tests.builders import cards
from tests.deviceplugin.loops import running
from tests.waiting import until

RECORD = ClaimRecord(
    "uid-a", "default", "a", (PreparedDevice("gpu", "n1", "card-0", "share", ("mgpu.io/claim=x",), "GPU-n1-0", 0),)
)
SECONDS = 30.0


class Preparation:
    """Prepares every claim at once, except those with a result of their own.

    Attributes:
        results: What happens to a claim, by its UID: an error, or a function that the call awaits.
    """

    def __init__(self) -> None:
        self.results: dict[str, Exception | Callable[[], Coroutine[Any, Any, None]]] = {}
        self.unprepared: list[str] = []
        self.cancelled: list[str] = []

    async def prepare(self, namespace: str, name: str, uid: str, deadline: float) -> ClaimRecord:  # noqa: ARG002
        found = self.results.get(uid)
        if isinstance(found, Exception):
            raise found
        if found is not None:
            try:
                await found()
            except asyncio.CancelledError:
                self.cancelled.append(uid)
                raise
        return replace(RECORD, uid=uid, namespace=namespace, name=name)

    def unprepare(self, uid: str) -> None:
        found = self.results.get(uid)
        if isinstance(found, Exception):
            raise found
        self.unprepared.append(uid)


class Plugin:
    """One agent's part for the kubelet."""

    def __init__(self, folder: Path) -> None:
        self.preparation = Preparation()
        self.cards: tuple[Card, ...] = cards(2)
        self.cards_changed = Wakeup()
        self.instances: dict[str, Card] = {}
        self.service = ClaimService(
            "n1",
            self.preparation,
            lambda: self.cards,
            self.cards_changed,
            lambda: self.registration.other_socket(),
            instances=lambda: self.instances,
        )
        self.registration = ClaimRegistration(folder, self.service, folder / "device-plugins" / "kubelet.sock")
        self.stops_serving: asyncio.Event | None = None

    async def run(self) -> None:
        self.cards_changed.bind()
        self.stops_serving = asyncio.Event()
        serving = asyncio.create_task(self.registration.run())
        try:
            async with self.service.serving():
                await self.stops_serving.wait()
            await asyncio.get_running_loop().create_future()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    @contextmanager
    def agent(self) -> Iterator[asyncio.AbstractEventLoop]:
        with running(self.run) as loop:
            until(lambda: self.stops_serving is not None)
            yield loop

    def hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.stops_serving is not None
        loop.call_soon_threadsafe(self.stops_serving.set)


@pytest.fixture
def plugin(folder: Path) -> Plugin:
    return Plugin(folder)


def found_sockets(folder: Path) -> list[Path]:
    return sorted((folder / "plugins_registry").glob("*.sock"))


def register(path: Path, error: str = "") -> str:
    """Register a plugin as the kubelet does, and return its endpoint."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = registration_services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
        info = stub.GetInfo(registration_api.InfoRequest(), timeout=SECONDS)
        assert (info.type, info.name) == ("DRAPlugin", "gpu.mgpu.io")
        assert [*info.supported_versions] == ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]
        status = registration_api.RegistrationStatus(plugin_registered=not error, error=error)
        stub.NotifyRegistrationStatus(status, timeout=SECONDS)
    endpoint: str = info.endpoint
    return endpoint


@contextmanager
def kubelet(folder: Path) -> Iterator[Any]:
    """Register the only plugin, and call it."""
    (path,) = until(lambda: found_sockets(folder))
    with grpc.insecure_channel(f"unix:{register(path)}") as channel:
        yield services.DRAPluginStub(channel)  # type: ignore[no-untyped-call]


def prepare(stub: Any, *uids: str) -> dict[str, Any]:
    claims = [api.Claim(namespace="default", name=uid, uid=uid) for uid in uids]
    return dict(stub.NodePrepareResources(api.NodePrepareResourcesRequest(claims=claims), timeout=SECONDS).claims)


def unprepare(stub: Any, *uids: str) -> dict[str, Any]:
    claims = [api.Claim(namespace="default", name=uid, uid=uid) for uid in uids]
    return dict(stub.NodeUnprepareResources(api.NodeUnprepareResourcesRequest(claims=claims), timeout=SECONDS).claims)


def test_plugin_is_registered(plugin: Plugin, folder: Path) -> None:
    with plugin.agent():
        assert plugin.registration.problem
        with kubelet(folder):
            until(lambda: plugin.registration.problem is None)
    assert found_sockets(folder) == []
    assert not [*(folder / "plugins" / "gpu.mgpu.io").glob("*.sock")]


def test_refused_plugin_tries_again_with_new_sockets(plugin: Plugin, folder: Path) -> None:
    with plugin.agent():
        (first,) = until(lambda: found_sockets(folder))
        register(first, "no handler registered for plugin type DRAPlugin")
        until(lambda: "no handler registered" in (plugin.registration.problem or ""))
        until(lambda: found_sockets(folder) not in ([], [first]))
        with kubelet(folder):
            until(lambda: plugin.registration.problem is None)


def test_kubelet_that_restarts_has_to_register_the_plugin_again(plugin: Plugin, folder: Path) -> None:
    socket_of_kubelet = folder / "device-plugins" / "kubelet.sock"
    socket_of_kubelet.parent.mkdir()
    socket_of_kubelet.touch()
    with plugin.agent(), kubelet(folder):
        until(lambda: plugin.registration.problem is None)
        socket_of_kubelet.unlink()
        until(lambda: "has restarted" in (plugin.registration.problem or ""))
        socket_of_kubelet.touch()
        register(found_sockets(folder)[0])
        until(lambda: plugin.registration.problem is None)


def test_sockets_of_killed_agents_are_removed(folder: Path) -> None:
    left, used = registration_socket(folder, "left"), service_socket(folder, "used")
    for path in (left, used):
        path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(left))
        alive.bind(str(used))
        alive.listen()
        dead.close()
        remove_leftovers(folder)
        assert not left.exists()
        assert used.exists()


def test_answer_names_the_devices(plugin: Plugin, folder: Path) -> None:
    with plugin.agent(), kubelet(folder) as stub:
        (device,) = prepare(stub, "a")["a"].devices
        assert (device.pool_name, device.device_name, device.share_id) == ("n1", "card-0", "share")
        assert [*device.request_names] == ["gpu"]
        assert [*device.cdi_device_ids] == ["mgpu.io/claim=x"]


def test_claim_that_fails_does_not_keep_others_from_their_answers(plugin: Plugin, folder: Path) -> None:
    plugin.preparation.results = {"b": Refused("no room"), "c": ValueError("a bug")}
    with plugin.agent(), kubelet(folder) as stub:
        answers = prepare(stub, "a", "b", "c")
        assert answers["a"].devices
        assert answers["b"].error == "no room"
        assert "a bug" in answers["c"].error


def test_each_claim_that_is_unprepared_has_an_answer(plugin: Plugin, folder: Path) -> None:
    plugin.preparation.results = {"b": OSError("read-only")}
    with plugin.agent(), kubelet(folder) as stub:
        answers = unprepare(stub, "a", "b")
        assert (answers["a"].error, "read-only" in answers["b"].error) == ("", True)
        assert plugin.preparation.unprepared == ["a"]


def test_call_that_the_kubelet_gives_up_is_cancelled(plugin: Plugin, folder: Path) -> None:
    plugin.preparation.results = {"a": lambda: asyncio.sleep(60)}
    with plugin.agent(), kubelet(folder) as stub:
        request = api.NodePrepareResourcesRequest(claims=[api.Claim(namespace="default", name="a", uid="a")])
        with pytest.raises(grpc.RpcError):
            stub.NodePrepareResources(request, timeout=0.3)
        until(lambda: plugin.preparation.cancelled == ["a"])


def test_health_is_reported_when_it_changes(plugin: Plugin, folder: Path) -> None:
    with plugin.agent():
        (path,) = until(lambda: found_sockets(folder))
        with grpc.insecure_channel(f"unix:{register(path)}") as channel:
            stub = health_services.DRAResourceHealthStub(channel)  # type: ignore[no-untyped-call]
            stream = stub.NodeWatchResources(health_api.NodeWatchResourcesRequest(), timeout=SECONDS)
            first = next(stream)
            assert [row.device.device_name for row in first.devices] == ["card-0", "card-1"]
            assert {row.health for row in first.devices} == {health_api.HEALTHY}
            plugin.cards = (plugin.cards[0], replace(plugin.cards[1], healthy=False))
            plugin.cards_changed.wake()
            second = next(stream)
            assert [row.health for row in second.devices] == [health_api.HEALTHY, health_api.UNHEALTHY]


def test_health_of_a_mig_instance_is_that_of_its_card(plugin: Plugin, folder: Path) -> None:
    plugin.cards = (plugin.cards[0], replace(plugin.cards[1], healthy=False))
    plugin.instances = {f"card-{card.index}-mig-2g-20gb-4": card for card in plugin.cards}
    with plugin.agent():
        (path,) = until(lambda: found_sockets(folder))
        with grpc.insecure_channel(f"unix:{register(path)}") as channel:
            stub = health_services.DRAResourceHealthStub(channel)  # type: ignore[no-untyped-call]
            found = next(stub.NodeWatchResources(health_api.NodeWatchResourcesRequest(), timeout=SECONDS))
    health = {row.device.device_name: row.health for row in found.devices}
    assert health == {
        "card-0": health_api.HEALTHY,
        "card-0-mig-2g-20gb-4": health_api.HEALTHY,
        "card-1": health_api.UNHEALTHY,
        "card-1-mig-2g-20gb-4": health_api.UNHEALTHY,
    }


def test_call_in_progress_is_passed_to_the_agent_that_takes_over(folder: Path) -> None:
    old, new = Plugin(folder), Plugin(folder)
    old.preparation.results = {"a": lambda: asyncio.sleep(60)}
    with old.agent() as loop, kubelet(folder) as stub:
        claims = [api.Claim(namespace="default", name="a", uid="a")]
        call = stub.NodePrepareResources.future(api.NodePrepareResourcesRequest(claims=claims), timeout=SECONDS)
        until(lambda: len(old.service._calls) == 1)
        old.hand_over(loop)
        until(lambda: old.preparation.cancelled == ["a"])
        with new.agent():
            assert call.result(SECONDS).claims["a"].devices
            unprepare(stub, "b")
            assert new.preparation.unprepared == ["b"]


def test_new_agent_answers_although_the_old_one_still_listens(folder: Path) -> None:
    """It must not pass the call back."""
    old, new = Plugin(folder), Plugin(folder)
    with old.agent(), kubelet(folder), new.agent():
        endpoints = until(lambda: found if len(found := found_sockets(folder)) == 2 else None)
        for path in endpoints:
            with grpc.insecure_channel(f"unix:{register(path)}") as channel:
                assert prepare(services.DRAPluginStub(channel), "a")["a"].devices  # type: ignore[no-untyped-call]
