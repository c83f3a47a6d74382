"""An API server that stops while clients connect closes every connection, also one that is not served yet."""

import contextlib
import gc
import socket
import threading
import warnings
from pathlib import Path

import pytest

from playground.apiserver.api_server import ApiServer, Served
from playground.apiserver.hosting import self_signed

ROUNDS, CLIENTS = 20, 4


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("abruptly", [False, True])
def test_server_stopped_while_clients_connect_leaves_no_connection(
    tmp_path: Path, encrypted: bool, abruptly: bool
) -> None:
    tls = self_signed(tmp_path) if encrypted else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(ROUNDS):
            _serve_and_end(Served(ApiServer(tokens={}), tls=tls), abruptly)
        gc.collect()
    assert [str(warning.message) for warning in seen if warning.category is ResourceWarning] == []


def _serve_and_end(served: Served, abruptly: bool) -> None:
    port, at_it, over = (
        int(served.start().rpartition(":")[2]),
        threading.Barrier(CLIENTS + 1, timeout=60),
        threading.Event(),
    )
    clients = [threading.Thread(target=_come_and_go, args=(port, at_it, over)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    at_it.wait()
    if abruptly:
        served.kill()
    served.close()
    over.set()
    for client in clients:
        client.join()


def _come_and_go(port: int, at_it: threading.Barrier, over: threading.Event) -> None:
    at_it.wait()
    with contextlib.suppress(OSError):
        while not over.is_set():
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(b"GET /version HTTP/1.1\r\nHost: it\r\n\r\n")
                client.recv(1)  # else more come than are let in, and the kernel has the next one wait a second
