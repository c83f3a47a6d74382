"""A watch behind a proxy that ends TCP: its connection to the server dies, the one to the client stays open."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu.kube import Api, client
from mgpu.kube.reflector import Reflector
from playground.apiserver import ApiServer, User, running, write_kubeconfig
from tests.waiting import until

CONFIGMAPS = "/api/v1/namespaces/default/configmaps"


class Proxy:
    """Forwards connections to a port of this machine; those that `freeze` finds stay open and forward nothing more."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._frozen = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._frozen.set()
        self._frozen = threading.Event()

    def close(self) -> None:
        for each in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += (near, far)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other, self._frozen), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, frozen: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if frozen.is_set():
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Api, Api, Proxy]]:
    """An API server: spoken to directly, through a proxy, and that proxy."""
    # Bookmarks as rare as those of a real server, so that silence is what the test sees.
    with running(ApiServer(tokens={"t": User("a", ("system:masters",))}, bookmark_every=60)) as url:
        proxy = Proxy(int(url.rpartition(":")[2]))
        apis = []
        for name, port in (("direct", url.rpartition(":")[2]), ("through", proxy.port)):
            write_kubeconfig(tmp_path / name, f"http://127.0.0.1:{port}", None, "t")
            apis.append(Api.connect(str(tmp_path / name)))
        yield apis[0], apis[1], proxy
        for api in apis:
            api.close()
        proxy.close()


def config_map(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


@pytest.mark.parametrize(
    ("seconds", "constant", "value"),
    [(1, "_GRACE_SECONDS", 0.2), (300, "_SILENCE_SECONDS", 1.0)],
    ids=["end-overdue", "long-silence"],
)
def test_half_open_watch_is_replaced_and_loses_nothing(
    served: tuple[Api, Api, Proxy], monkeypatch: pytest.MonkeyPatch, seconds: int, constant: str, value: float
) -> None:
    monkeypatch.setattr(client, constant, value)
    direct, through, proxy = served
    seen: queue.Queue[str] = queue.Queue()
    reflector = Reflector(
        through, CONFIGMAPS, lambda raw: seen.put(raw["metadata"]["name"]), lambda _: None, watch_seconds=seconds
    )
    reflector.start()
    try:
        assert reflector.wait_synced(10)
        direct.create(CONFIGMAPS, config_map("first"))
        assert seen.get(timeout=10) == "first"
        proxy.freeze()
        direct.create(CONFIGMAPS, config_map("second"))
        began = time.monotonic()
        assert seen.get(timeout=30) == "second"
        assert time.monotonic() - began < 10
        assert reflector.restarts == 0, "nothing had to be listed again"
        until(lambda: reflector.broken_for == 0)
    finally:
        reflector.stop()
