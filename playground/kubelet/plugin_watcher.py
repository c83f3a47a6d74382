"""Watches the folder `plugins_registry` and registers the plugins of DRA drivers whose sockets appear there.

It reproduces pkg/kubelet/pluginmanager of Kubernetes 1.36. The real kubelet is notified of changes of the folder and
acts on them once a second; this watcher reads the folder once a second instead.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from playground.kubelet.drivers import Drivers
from playground.kubelet.pod_claims import ClaimError
from playground.kubelet.services import rpc_message
from proto import pluginregistration_pb2 as api
from proto import pluginregistration_pb2_grpc as services

log = logging.getLogger(__name__)

TYPE = "DRAPlugin"
_INFO_SECONDS = 1.0
_NOTIFY_SECONDS = 5.0
_FIRST_BACKOFF = 0.5
_LONGEST_BACKOFF = 122.0


class _RegistrationError(Exception):
    """A plugin could not be registered. The attempt is repeated."""


@dataclass(frozen=True, slots=True)
class _Socket:
    """A socket in the folder. A socket that was replaced by another one of the same name is not equal to it."""

    path: Path
    inode: int
    changed: int


@dataclass(frozen=True, slots=True)
class _Backoff:
    """When a failed registration is tried again, and after which pause."""

    at: float
    pause: float


class PluginWatcher:
    """Registers plugins with `Drivers`, and unregisters them when their sockets are gone.

    Args:
        folder: The folder `plugins_registry`. Its subfolders count too, but no names that begin with a dot.
        drivers: Gets the plugins.
        seconds: The time between two looks at the folder.
        tick: Called after each look at the folder.
    """

    def __init__(self, folder: Path, drivers: Drivers, seconds: float, tick: Callable[[], None]) -> None:
        self._folder = folder
        self._drivers = drivers
        self._seconds = seconds
        self._tick = tick
        self._registered: dict[_Socket, tuple[str, str]] = {}
        self._failed: dict[_Socket, _Backoff] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plugins registry", daemon=True)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.reconcile()
            self._tick()
            self._stopped.wait(self._seconds)

    def reconcile(self) -> None:
        """Unregister the plugins whose sockets are gone or replaced, and then register those of new sockets."""
        there = set(self._sockets())
        for socket in [socket for socket in self._registered if socket not in there]:
            self._drivers.remove(*self._registered.pop(socket))
        self._failed = {socket: backoff for socket, backoff in self._failed.items() if socket in there}
        for socket in sorted(there - self._registered.keys(), key=lambda each: str(each.path)):
            backoff = self._failed.get(socket)
            if backoff is None or backoff.at <= time.monotonic():
                self._try(socket)

    def _sockets(self) -> Iterator[_Socket]:
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                try:
                    if not name.startswith(".") and path.is_socket():
                        found = path.stat()
                        yield _Socket(path, found.st_ino, found.st_ctime_ns)
                except FileNotFoundError:
                    continue  # It was removed meanwhile.

    def _try(self, socket: _Socket) -> None:
        try:
            self._register(socket)
        except _RegistrationError as error:
            log.info("plugin at %s not registered: %s", socket.path, error)
            known = self._failed.get(socket)
            pause = min(2 * known.pause, _LONGEST_BACKOFF) if known else _FIRST_BACKOFF
            self._failed[socket] = _Backoff(time.monotonic() + pause, pause)
        else:
            self._failed.pop(socket, None)

    def _register(self, socket: _Socket) -> None:
        """Ask the plugin what it is, register it, and tell it the result. Raises _RegistrationError."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{socket.path}", options=options) as channel:
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            info = _called(lambda: stub.GetInfo(api.InfoRequest(), timeout=_INFO_SECONDS))
            endpoint = info.endpoint or str(socket.path)
            refusal = self._refusal(info, endpoint)
            if refusal is not None:
                _notify(stub, f"RegisterPlugin error -- plugin validation failed with err: {refusal}")
                raise _RegistrationError(refusal)
            try:
                self._drivers.add(info.name, endpoint)
            except ClaimError as error:
                _notify(stub, f"RegisterPlugin error -- plugin registration failed with err: {error}")
                raise _RegistrationError(str(error)) from error
            try:
                _notify(stub, "")
            except _RegistrationError:
                self._drivers.remove(info.name, endpoint)
                raise
            self._registered[socket] = info.name, endpoint

    def _refusal(self, info: api.PluginInfo, endpoint: str) -> str | None:
        """Return why a plugin cannot be registered, or None if it can be."""
        if info.type != TYPE:
            return f"no handler registered for plugin type: {info.type}"
        return self._drivers.refusal(info.name, endpoint, info.supported_versions)


def _notify(stub: Any, error: str) -> None:
    """Tell a plugin whether it is registered: with an empty `error` it is. Raises _RegistrationError."""
    status = api.RegistrationStatus(plugin_registered=not error, error=error)
    _called(lambda: stub.NotifyRegistrationStatus(status, timeout=_NOTIFY_SECONDS))


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        raise _RegistrationError(rpc_message(error)) from error
