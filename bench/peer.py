"""The peer: another scheduler extender that `filter` measures beside mgpu, if MGPU_BENCH_PEER has its command.

In the command, `{port}` is the port on which the extender must listen, and its environment has KUBECONFIG. The API
server behind it is a stub, which this module runs as a process of its own: `python -m bench.peer NODES`. It lists Nodes
and Pods in the vocabulary of HAMi, has no other objects, and accepts each write without storing it. So the peer must be
HAMi's scheduler, or one that reads the same annotations.
"""

import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from bench.clusters import CARDS, PODS, running
from bench.node import cpu_seconds
from bench.serving import Client, quantiles
from playground.apiserver import write_kubeconfig
from playground.processes import free_port
from tests import builders as b
from tests.waiting import until

COMMAND = "MGPU_BENCH_PEER"
_CALLS = 5
_READY_SECONDS = 300
_CARD_MIB = 80 << 10
_VENDORS = ("", "-dcu", "-va", "-biren", "-xpu")
"""The ends of the annotations by which HAMi and the agents of all vendors exchange signs of life."""


class Peer:
    """A peer that runs and knows the nodes."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def filter(self, nodes: int, core: int, mib: int) -> tuple[float, float]:
        """Return the median duration and the mean CPU time of a call of `filter`, in milliseconds.

        Few calls are enough for a peer that takes seconds. They all are for one pod, so that no earlier call matters.
        """
        body = {"Pod": peer_pod("p", core, mib), "NodeNames": [f"node-{i}" for i in range(nodes)]}
        times, before = list[float](), cpu_seconds(self._client.pid)
        for _ in range(_CALLS):
            took, answer = self._client.timed("/filter", body)
            times.append(took)
            if error := orjson.loads(answer).get("Error"):
                raise RuntimeError(f"the peer answered: {error}")
        return quantiles(times)[0], 1000 * (cpu_seconds(self._client.pid) - before) / _CALLS


@contextmanager
def peer(nodes: int) -> Iterator[Peer | None]:
    """Run the peer in a cluster like that of `bench.clusters.fill`, or yield None if there is none."""
    command = os.environ.get(COMMAND)
    if not command:
        yield None
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = stack.enter_context(_process([sys.executable, "-m", "bench.peer", str(nodes)], subprocess.PIPE))
        assert api.stdout is not None
        write_kubeconfig(folder / "kubeconfig", api.stdout.readline().decode().strip(), b"", "admin")
        port = free_port()
        words = shlex.split(command.replace("{port}", str(port)))
        log = stack.enter_context((folder / "log").open("wb"))
        # The stub does not send lists as events of a watch, which newer clients ask for.
        environ = {"KUBECONFIG": str(folder / "kubeconfig"), "KUBE_FEATURE_WatchListClient": "false"}
        process = stack.enter_context(_process(words, log, {**os.environ, **environ}))
        client = Client(port, process.pid)
        stack.callback(client.close)
        until(lambda: _knows(client, process, folder / "log"), _READY_SECONDS)
        yield Peer(client)


@contextmanager
def _process(
    command: list[str], output: Any, environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    errors = None if output == subprocess.PIPE else subprocess.STDOUT
    with subprocess.Popen(command, stdout=output, stderr=errors, env=environ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _knows(client: Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Return whether the peer has found room for a small pod on one of the first nodes."""
    if process.poll() is not None:
        raise RuntimeError(f"the peer ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
    names = [f"node-{i}" for i in range(2)]
    try:
        answer = orjson.loads(client.post("/filter", {"Pod": peer_pod("ready", 1, 1024), "NodeNames": names}))
    except OSError:
        client.close()
        return False
    return bool(answer.get("NodeNames"))


def peer_pod(name: str, core: int, mib: int, node: str = "", card: str = "") -> dict[str, Any]:
    """Return a pod that requests a share of a card, and that runs on a node with the card if these are given."""
    raw = b.pod(name, {"name": "c"}, node=node, phase="Running" if node else "Pending")
    amounts = {"nvidia.com/gpu": "1", "nvidia.com/gpucores": str(core), "nvidia.com/gpumem": str(mib)}
    raw["spec"]["containers"][0]["resources"] = {"limits": amounts, "requests": amounts}
    if node:
        devices = f"{card},NVIDIA,{mib},{core}:;"
        raw["metadata"]["annotations"] = {"hami.io/vgpu-node": node, "hami.io/vgpu-devices-allocated": devices}
    return raw


def peer_node(name: str, handshake: str) -> dict[str, Any]:
    """Return a node whose agent has registered its cards."""
    cards = [
        {"id": _uuid(name, i), "index": i, "count": 10, "devmem": _CARD_MIB, "devcore": 100, "mode": "hami-core"}
        | {"type": "NVIDIA-A100-SXM4-80GB", "health": True}
        for i in range(CARDS)
    ]
    registered = {f"hami.io/node-handshake{vendor}": handshake for vendor in _VENDORS}
    registered["hami.io/node-nvidia-register"] = orjson.dumps(cards).decode()
    amounts = {"cpu": "640", "memory": "2Ti", "pods": "1000", "nvidia.com/gpu": str(10 * CARDS)}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": registered}, "status": status}


def lists(nodes: int) -> dict[str, list[bytes]]:
    """Return the items of each API path as JSON: the cluster of `bench.clusters.fill` in the peer's vocabulary."""
    pick = random.Random(0)
    # HAMi has asked the agents to register again, and waits. Otherwise it would now write to each node.
    handshake = f"Requesting_{datetime.now():%Y-%m-%d %H:%M:%S}"
    pods = []
    for i in range(nodes):
        for j in range(PODS):
            like = running(f"{i}-{j}", i, pick.randrange(1 << 30))["spec"]["containers"][0]["resources"]["limits"]
            core, mib = (int(like[f"vke.volcengine.com/mgpu-{kind}"]) for kind in ("core", "memory"))
            pods.append(peer_pod(f"{i}-{j}", core, mib, f"node-{i}", _uuid(f"node-{i}", j)))
    made = {"/api/v1/nodes": [peer_node(f"node-{i}", handshake) for i in range(nodes)], "/api/v1/pods": pods}
    return {path: [orjson.dumps(item) for item in items] for path, items in made.items()}


def _uuid(node: str, card: int) -> str:
    return f"GPU-{node}-{card}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    made: dict[str, list[bytes]]

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if "watch" in query:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(3600)
        self._answer(b'{"metadata":{"resourceVersion":"1"},"items":[%s]}' % b",".join(self.made.get(path, [])))

    def do_POST(self) -> None:
        """Answer a write with what was written."""
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def do_PATCH(self) -> None:
        self.do_POST()

    def _answer(self, body: bytes) -> None:
        # In one segment: a client that gets head and body in two waits 40 ms for the second.
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the peer has closed its connection because it ends."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve(nodes: int) -> None:
    _Handler.made = lists(nodes)
    server = _Server(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
