"""The registration of a plugin, while the kubelet and the plugin restart."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
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
    """The Registration service; it reads the device list of each plugin that registers.

    Attributes:
        refuse: how many registrations it refuses.
        deaf: whether it accepts registrations and reads no list, as a kubelet that ends after its answer.
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
        """Start a server; earlier ones stay, because their end would remove the socket."""
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


@pytest.fixture
def kubelet(folder: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet(folder)
    yield kubelet
    kubelet.stop()


@pytest.fixture
def plugin() -> Plugin:
    plugin = Plugin(CORE, None, DeviceList())  # type: ignore[arg-type]
    plugin.device_list.offer({"0": True, "1": False})
    return plugin


def wait_for_registration(kubelet: Kubelet, registration: Registration) -> None:
    kubelet.registered.get(timeout=60)
    until(lambda: registration.is_registered)


@pytest.fixture
def registration(folder: Path, plugin: Plugin) -> Registration:
    return Registration(folder, plugin, check_seconds=0.02)


def test_plugin_registers_and_sends_each_device_list(
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


def test_end_closes_the_stream_and_removes_the_socket(
    folder: Path, kubelet: Kubelet, registration: Registration
) -> None:
    (folder / "mgpu-core.sock").write_text("of a killed agent")
    with running(registration.run):
        kubelet.lists.get(timeout=60)
    assert kubelet.ended.get(timeout=60) is grpc.StatusCode.OK
    assert not (folder / "mgpu-core.sock").exists()


def test_plugin_waits_for_the_kubelet(folder: Path, registration: Registration) -> None:
    with running(registration.run):
        until(lambda: "waiting for the kubelet" in str(registration.problem))
        kubelet = Kubelet(folder)
        wait_for_registration(kubelet, registration)
    kubelet.stop()


def test_new_kubelet_interrupts_the_pause_after_a_failure(
    folder: Path, registration: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.plugin.registration._FIRST_PAUSE", 3600.0)
    (folder / "kubelet.sock").write_text("of a killed kubelet")
    with running(registration.run):
        until(lambda: "not registered with the kubelet" in str(registration.problem))
        kubelet = Kubelet(folder)
        wait_for_registration(kubelet, registration)
    kubelet.stop()


def restart(kubelet: Kubelet, folder: Path) -> None:
    kubelet.stop()
    (folder / "mgpu-core.sock").unlink(missing_ok=True)
    kubelet.start()


def replace_socket(kubelet: Kubelet, folder: Path) -> None:
    (folder / "kubelet.sock").unlink()
    kubelet.start()


def end_stream(kubelet: Kubelet, _: Path) -> None:
    kubelet.hang_up()


def remove_socket(_: Kubelet, folder: Path) -> None:
    (folder / "mgpu-core.sock").unlink()


@pytest.mark.parametrize("lose", [restart, replace_socket, end_stream, remove_socket], ids=lambda lose: lose.__name__)
def test_lost_registration_is_repeated(
    kubelet: Kubelet, registration: Registration, folder: Path, lose: Callable[[Kubelet, Path], None]
) -> None:
    with running(registration.run):
        wait_for_registration(kubelet, registration)
        kubelet.lists.get(timeout=60)
        lose(kubelet, folder)
        wait_for_registration(kubelet, registration)
        assert kubelet.lists.get(timeout=60)
        assert (folder / "mgpu-core.sock").is_socket()


def test_renewal_survives_a_kubelet_restart_before_the_list(
    kubelet: Kubelet, registration: Registration, folder: Path
) -> None:
    """Otherwise the agent would seem ready, and no pod could start on the node until the agent restarts."""
    with running(registration.run) as loop:
        wait_for_registration(kubelet, registration)
        kubelet.deaf = True
        renewal = asyncio.run_coroutine_threadsafe(registration.renew(), loop)
        kubelet.registered.get(timeout=60)
        kubelet.deaf = False
        (folder / "kubelet.sock").unlink()
        kubelet.start()
        kubelet.registered.get(timeout=20)
        until(lambda: registration.is_registered)
        renewal.result(20)


def test_refused_renewal_is_repeated_at_once(kubelet: Kubelet, registration: Registration) -> None:
    with running(registration.run) as loop:
        wait_for_registration(kubelet, registration)
        kubelet.refuse = 1
        began = time.monotonic()
        asyncio.run_coroutine_threadsafe(registration.renew(), loop).result(60)
        wait_for_registration(kubelet, registration)
        assert time.monotonic() - began < 8, "without a registration, the resource has no devices"


def test_refused_registration_is_reported_and_repeated(kubelet: Kubelet, registration: Registration) -> None:
    kubelet.refuse = 2
    with running(registration.run):
        until(lambda: "not now" in str(registration.problem))
        assert not registration.is_registered
        wait_for_registration(kubelet, registration)


def test_socket_that_cannot_be_created_is_reported_and_retried(folder: Path, plugin: Plugin, kubelet: Kubelet) -> None:
    """The disk is full, or the folder is being replaced."""
    away = folder.with_name(f"{folder.name}-away")
    renames = iter([folder.rename])

    def not_served_reason() -> None:
        for rename in renames:  # once, after the kubelet's socket was found
            rename(away)

    registration = Registration(folder, plugin, check_seconds=0.02, not_served_reason=not_served_reason)
    with running(registration.run):
        until(away.exists)
        until(lambda: "waiting for the kubelet" in str(registration.problem))
        away.rename(folder)
        wait_for_registration(kubelet, registration)


class SlowServer:
    """A server that stops when the test says so, and awaits that as the one of grpc.aio does."""

    def __init__(self) -> None:
        self.is_stopping = asyncio.Event()
        self.ended = asyncio.get_running_loop().create_future()

    def add_registered_method_handlers(self, *_: object) -> None: ...

    def add_generic_rpc_handlers(self, _: object) -> None: ...

    def add_insecure_port(self, _: str) -> None: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None:
        self.is_stopping.set()
        await asyncio.wait_for(asyncio.shield(self.ended), grace)


@pytest.mark.parametrize("turns", range(8))
def test_cancellation_while_the_server_stops_is_not_lost(
    folder: Path, registration: Registration, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The cancellation may arrive in any turn of the loop."""
    (folder / "kubelet.sock").write_text("nobody listens")

    async def work() -> bool:
        server = SlowServer()
        monkeypatch.setattr(grpc.aio, "server", lambda **_: server)
        task = asyncio.create_task(registration.run())
        await server.is_stopping.wait()
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
def test_socket_is_named_after_the_resource(resource: str, name: str) -> None:
    assert socket_name(resource) == name
