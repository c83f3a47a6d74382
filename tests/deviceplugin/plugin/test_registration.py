"""Registered with the kubelet, whatever happens to either."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.plugin.plugin_server import DeviceList, Plugin
from deviceplugin.plugin.registration import Registration, socket_name
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services
from tests.builders import CORE
from tests.deviceplugin.loops import running
from tests.waiting import until


class Kubelet:
    """The registration side; it follows the list of whoever registers. `refuse`: so many registrations first.

    `deaf`: it answers and follows no list, as one that ends right after its answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.registered: queue.Queue[api.RegisterRequest] = queue.Queue()
        self.lists: queue.Queue[dict[str, str]] = queue.Queue()
        self.ended: queue.Queue[grpc.StatusCode] = queue.Queue()
        self.refuse = 0
        self.deaf = False
        self._channel: Any = None
        self._servers: list[Any] = []
        self.start()

    def start(self) -> None:
        """Also beside the one before, whose end would remove the socket of both."""
        (self._folder / "kubelet.sock").unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(4))
        services.add_RegistrationServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix:{self._folder / 'kubelet.sock'}")
        server.start()
        self._servers.append(server)

    def stop(self) -> None:
        for server in self._servers:
            server.stop(None).wait()
        self._servers.clear()
        self.hang_up()

    def hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:  # noqa: N802
        if self.refuse:
            self.refuse -= 1
            context.abort(grpc.StatusCode.UNKNOWN, "not now")
        if self.deaf:
            self.registered.put(request)
            return api.Empty()
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"unix:{self._folder / request.endpoint}", options=options)
        grpc.channel_ready_future(self._channel).result(60)
        stream = services.DevicePluginStub(self._channel).ListAndWatch(api.Empty())  # type: ignore[no-untyped-call]
        threading.Thread(target=self._follow, args=(stream,), daemon=True).start()
        self.registered.put(request)
        return api.Empty()

    def _follow(self, stream: Any) -> None:
        try:
            for answer in stream:
                self.lists.put({device.ID: device.health for device in answer.devices})
        except grpc.RpcError as error:
            self.ended.put(error.code())
        else:
            self.ended.put(grpc.StatusCode.OK)


class NoAllocations:
    """Nothing is allocated here."""


@pytest.fixture
def kubelet(folder: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet(folder)
    yield kubelet
    kubelet.stop()


@pytest.fixture
def plugin() -> Plugin:
    plugin = Plugin(CORE, NoAllocations(), DeviceList())  # type: ignore[arg-type]
    plugin.device_list.offer({"0": True, "1": False})
    return plugin


@pytest.fixture
def registration(folder: Path, plugin: Plugin) -> Registration:
    return Registration(folder, plugin, check_seconds=0.02)


def test_it_registers_and_sends_the_list_and_every_change(
    kubelet: Kubelet, plugin: Plugin, registration: Registration
) -> None:
    with running(registration.run):
        request = kubelet.registered.get(timeout=60)
        assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "mgpu-core.sock", CORE)
        assert request.options.pre_start_required
        assert not request.options.get_preferred_allocation_available
        assert kubelet.lists.get(timeout=60) == {"0": "Healthy", "1": "Unhealthy"}
        until(lambda: registration.is_registered)
        plugin.device_list.offer({"0": False, "1": False})
        assert kubelet.lists.get(timeout=60) == {"0": "Unhealthy", "1": "Unhealthy"}


def test_it_ends_its_stream_well_and_leaves_no_socket(
    folder: Path, kubelet: Kubelet, registration: Registration
) -> None:
    (folder / "mgpu-core.sock").write_text("left by an agent that was killed")
    with running(registration.run):
        kubelet.lists.get(timeout=60)
    assert kubelet.ended.get(timeout=60) is grpc.StatusCode.OK
    assert not (folder / "mgpu-core.sock").exists()


def test_it_waits_for_a_kubelet_that_is_not_there_yet(folder: Path, registration: Registration) -> None:
    with running(registration.run):
        until(lambda: "waiting for the kubelet" in str(registration.problem))
        kubelet = Kubelet(folder)
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
    kubelet.stop()


def test_a_kubelet_that_comes_back_is_registered_with_again(
    kubelet: Kubelet, registration: Registration, folder: Path
) -> None:
    with running(registration.run):
        kubelet.lists.get(timeout=60)
        kubelet.stop()
        (folder / "mgpu-core.sock").unlink(missing_ok=True)
        kubelet.start()
        kubelet.registered.get(timeout=60)
        kubelet.registered.get(timeout=60)
        assert kubelet.lists.get(timeout=60)


def test_a_socket_file_that_is_made_anew_is_another_kubelet(
    kubelet: Kubelet, registration: Registration, folder: Path
) -> None:
    with running(registration.run):
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
        (folder / "kubelet.sock").unlink()
        kubelet.start()
        kubelet.registered.get(timeout=60)


def test_a_kubelet_in_place_of_one_that_was_killed_waits_for_no_pause(
    folder: Path, registration: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.plugin.registration._FIRST_PAUSE", 3600.0)
    (folder / "kubelet.sock").write_text("left by a kubelet that was killed")
    with running(registration.run):
        until(lambda: "not registered with the kubelet" in str(registration.problem))
        kubelet = Kubelet(folder)
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
    kubelet.stop()


@pytest.mark.parametrize("lost", ["stream", "socket"])
def test_a_lost_stream_or_socket_is_made_good(
    kubelet: Kubelet, registration: Registration, folder: Path, lost: str
) -> None:
    with running(registration.run):
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
        kubelet.hang_up() if lost == "stream" else (folder / "mgpu-core.sock").unlink()
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
        assert (folder / "mgpu-core.sock").is_socket()


def test_renewal_kubelet_restarts_before_it_asks_for_the_list_agent_registers_again(
    kubelet: Kubelet, registration: Registration, folder: Path
) -> None:
    """Otherwise no pod could start on the node until the agent is restarted, and the agent would seem ready."""
    with running(registration.run) as loop:
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
        kubelet.deaf = True
        renewal = asyncio.run_coroutine_threadsafe(registration.renew(), loop)
        kubelet.registered.get(timeout=60)
        kubelet.deaf = False
        (folder / "kubelet.sock").unlink()
        kubelet.start()
        kubelet.registered.get(timeout=20)
        until(lambda: registration.is_registered)
        renewal.result(20)


def test_renewal_refused_for_a_moment_agent_registers_again_at_once(
    kubelet: Kubelet, registration: Registration
) -> None:
    with running(registration.run) as loop:
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
        kubelet.refuse = 1
        began = time.monotonic()
        asyncio.run_coroutine_threadsafe(registration.renew(), loop).result(60)
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)
        assert time.monotonic() - began < 8, "the resource is without devices meanwhile"


def test_a_refusal_is_told_and_tried_again(kubelet: Kubelet, registration: Registration) -> None:
    kubelet.refuse = 2
    with running(registration.run):
        until(lambda: "not now" in str(registration.problem))
        assert not registration.is_registered
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)


def test_a_folder_that_takes_no_socket_is_told_and_tried_again(folder: Path, plugin: Plugin, kubelet: Kubelet) -> None:
    """Its disk is full, or it is just being made anew."""
    away = folder.with_name(f"{folder.name}-away")
    looks = iter([folder.rename])

    def not_served_reason() -> None:
        for rename in looks:  # once, after the kubelet was found in it
            rename(away)

    registration = Registration(folder, plugin, check_seconds=0.02, not_served_reason=not_served_reason)
    with running(registration.run):
        until(away.exists)
        until(lambda: "waiting for the kubelet" in str(registration.problem))
        away.rename(folder)
        kubelet.registered.get(timeout=60)
        until(lambda: registration.is_registered)


class Ending:
    """A server that is told when it has stopped, and awaits that as grpc.aio's does."""

    def __init__(self) -> None:
        self.asked, self.ended = asyncio.Event(), asyncio.get_running_loop().create_future()

    def add_registered_method_handlers(self, *_: object) -> None: ...

    def add_generic_rpc_handlers(self, _: object) -> None: ...

    def add_insecure_port(self, _: str) -> None: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None:
        self.asked.set()
        await asyncio.wait_for(asyncio.shield(self.ended), grace)


@pytest.mark.parametrize("turns", range(8))
def test_it_ends_where_it_is_told_to_while_a_server_stops(
    folder: Path, registration: Registration, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Whatever turn of the loop that is: the kubelet and the agent may be killed in the same moment."""
    (folder / "kubelet.sock").write_text("nobody listens")

    async def work() -> bool:
        server = Ending()
        monkeypatch.setattr(grpc.aio, "server", lambda **_: server)
        task = asyncio.create_task(registration.run())
        await server.asked.wait()
        server.ended.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        return task.cancelled()

    assert asyncio.run(work())


@pytest.mark.parametrize(
    ("resource", "name"),
    [(CORE, "mgpu-core.sock"), ("koordinator.sh/gpu-core", "mgpu-gpu-core.sock"), ("nvidia.com/gpu", "mgpu-gpu.sock")],
)
def test_every_resource_has_a_socket_of_its_own(resource: str, name: str) -> None:
    assert socket_name(resource) == name
