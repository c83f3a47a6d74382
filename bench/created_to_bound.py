"""Measures how many pods per second a real kube-scheduler binds, with mgpu and without it.

`python -m bench.created_to_bound` runs it if the directory KUBEBUILDER_ASSETS has etcd, kube-apiserver and
kube-scheduler. The clusters take turns. Each turn starts a kube-scheduler, creates the pods over several connections,
and waits until all of them are bound. There is no kubelet.

The CPU time of each process is measured, too, because it varies less than the rate on a machine with few cores.
"""

import json
import os
import ssl
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import yaml

from bench.node import cpu_seconds
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import Node
from playground.apiserver import User, write_kubeconfig
from playground.cluster import ASSETS, CORE, MANAGED, MEMORY, Cluster
from playground.processes import Process, free_port
from playground.realapi import real_api_server
from tests.builders import cards, share

CARDS, CREATORS, CONNECTIONS = 8, 8, 8
_PODS = "/api/v1/namespaces/default/pods"
_SECONDS = 240.0
_POLL_SECONDS = 0.03


class Client:
    """An HTTPS connection to an API server that reads and writes JSON bodies with little work of this process."""

    def __init__(self, url: str, ca: Path, token: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        context = ssl.create_default_context(cafile=str(ca))
        self._connection = HTTPSConnection(urlsplit(url).netloc, context=context, timeout=_SECONDS)

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the body of the answer. Raises RuntimeError for a status of 300 or more."""
        self._connection.request(method, path, body, self._headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:500]!r}")
        return data


@dataclass(frozen=True, slots=True)
class Server:
    """An API server, and what runs beside it.

    Attributes:
        pids: The process IDs by the name under which their CPU time is reported.
        kubeconfig: The file for kube-scheduler.
    """

    url: str
    ca: Path
    token: str
    kubeconfig: Path
    pids: Mapping[str, Sequence[int]]

    def client(self) -> Client:
        return Client(self.url, self.ca, self.token)


@dataclass(frozen=True, slots=True)
class Setup:
    """A way in which pods are bound.

    Attributes:
        extender: The URL of the extender, or None if kube-scheduler calls none.
        percentage: kube-scheduler's `percentageOfNodesToScore`; 0 is its default.
    """

    name: str
    server: Server
    extender: str | None = None
    percentage: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn has measured: pods per second, the median time of a create, and CPU milliseconds per pod."""

    rate: float
    create_ms: float
    cpu: Mapping[str, float]


@contextmanager
def plain_server(assets: Path) -> Iterator[Server]:
    """Run an API server without webhooks."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        token = "t" * 32
        with real_api_server(assets, folder, {token: User("admin", ("system:masters",))}) as (url, ca):
            kubeconfig = folder / "admin.kubeconfig"
            write_kubeconfig(kubeconfig, url, ca.read_bytes(), token)
            client = Client(url, ca, token)
            crd = yaml.safe_load(Path("manifests/crds/device.yaml").read_text())
            client.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", orjson.dumps(crd))
            yield Server(url, ca, token, kubeconfig, _api_pids(folder))


class MgpuCluster(Cluster):
    """A cluster whose mgpu processes run from a given checkout."""

    def __init__(self, assets: str, root: Path) -> None:
        super().__init__([], assets=assets, controllers=False)
        self._root = root

    def commands(self, ports: Mapping[str, int]) -> dict[str, list[str]]:
        found = super().commands(ports)
        return {name: ["/usr/bin/env", f"PYTHONPATH={self._root}", *command] for name, command in found.items()}

    @property
    def server(self) -> Server:
        config = yaml.safe_load(self.kubeconfig.read_text())
        token = config["users"][0]["user"]["token"]
        pids = dict(_api_pids(self.folder / "api"))
        pids |= {name: _tree(process.pid) for name, process in self.processes.items()}
        return Server(self.url, next((self.folder / "api").glob("*.crt")), token, self.kubeconfig_of("admin"), pids)


def _api_pids(folder: Path) -> dict[str, list[int]]:
    """Return the process IDs of etcd and kube-apiserver, which have the folder in their command lines."""
    found: dict[str, list[int]] = {"etcd": [], "kube-apiserver": []}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # the process has ended
        name = Path(words[0]).name
        if name in found and any(str(folder) in word for word in words):
            found[name].append(int(entry.parent.name))
    return found


def _tree(pid: int) -> list[int]:
    """Return the process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in _tree(int(child)))]


def add_nodes(server: Server, nodes: int) -> None:
    """Create Nodes with their Devices. Neither kubelets nor agents run."""
    amounts = {CORE: str(100 * CARDS), MEMORY: str(CARDS * 80 << 10)}
    capacity = {"cpu": "640", "memory": "2Ti", "pods": "1000", **amounts}
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]}

    def add(client: Client, i: int) -> None:
        name = f"node-{i}"
        labels = {"vke.node.gpu.schedule": "mgpu", "kubernetes.io/hostname": name}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
        uid = orjson.loads(client.call("POST", "/api/v1/nodes", orjson.dumps(body)))["metadata"]["uid"]
        device = write_device(Node(name), uid, cards(CARDS, node=name))
        client.call("POST", f"/apis/{DEVICE_API}/devices", orjson.dumps(device))

    _spread(server, nodes, add)


def _spread(server: Server, count: int, do: Any) -> list[float]:
    """Call `do(client, i)` for each i over several connections. Return the seconds of each call."""
    numbers = iter(range(count))
    lock = threading.Lock()
    took: list[float] = []

    def work(_: int) -> None:
        client = server.client()
        while True:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            began = time.perf_counter()
            do(client, i)
            took.append(time.perf_counter() - began)

    with ThreadPoolExecutor(CREATORS) as pool:
        list(pool.map(work, range(CREATORS)))
    return took


@contextmanager
def kube_scheduler(assets: Path, setup: Setup) -> Iterator[Process]:
    """Run kube-scheduler inside the context."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        port = free_port()
        (folder / "config.yaml").write_text(json.dumps(_configuration(setup)))
        flags = ("--config", str(folder / "config.yaml"), "--secure-port", str(port), "--bind-address", "127.0.0.1")
        command = [str(assets / "kube-scheduler"), *flags, "--cert-dir", name, "--authentication-skip-lookup"]
        process = Process("kube-scheduler", command, folder / "log", os.environ)
        process.start()
        try:
            process.wait("ready", lambda: _ready(port), 60)
            yield process
        finally:
            process.stop()


def _ready(port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/readyz", context=context, timeout=5):
            return True
    except OSError:
        return False


def _configuration(setup: Setup) -> dict[str, Any]:
    connection = {"kubeconfig": str(setup.server.kubeconfig), "qps": 5000, "burst": 10000}
    profile: dict[str, Any] = {"schedulerName": "default-scheduler"}
    if setup.percentage:
        profile["percentageOfNodesToScore"] = setup.percentage
    config: dict[str, Any] = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": connection,
        "profiles": [profile],
    }
    if setup.extender:
        extender = {"urlPrefix": setup.extender, "weight": 5, "nodeCacheCapable": True, "httpTimeout": "10s"}
        extender |= {f"{verb}Verb": verb for verb in ("filter", "prioritize", "preempt")}
        managed = [{"name": name, "ignoredByScheduler": ignored} for name, ignored in MANAGED.items()]
        config["extenders"] = [{**extender, "managedResources": managed}]
    return config


def turn(assets: Path, setup: Setup, number: int, pods: int) -> Turn:
    """Create pods, and wait until they are bound. The pods are deleted afterwards."""
    with kube_scheduler(assets, setup) as process:
        bodies = [_pod(f"p{number}-{i}") for i in range(pods)]
        pids = {**setup.server.pids, "kube-scheduler": [process.pid]}
        before = {name: sum(map(cpu_seconds, group)) for name, group in pids.items()}
        began = time.perf_counter()
        took = _spread(setup.server, pods, lambda client, i: client.call("POST", _PODS, bodies[i]))
        _wait_bound(setup.server)
        seconds = time.perf_counter() - began
        used = {name: sum(map(cpu_seconds, group)) - before[name] for name, group in pids.items()}
    setup.server.client().call("DELETE", f"{_PODS}?gracePeriodSeconds=0")
    cpu = {name: 1000 * value / pods for name, value in used.items()}
    return Turn(pods / seconds, 1000 * statistics.median(took), cpu)


def _wait_bound(server: Server) -> None:
    """Wait until all pods have a node. Poll, since the API server ends a watch that a busy process reads too late."""
    client = server.client()
    deadline = time.monotonic() + _SECONDS
    while orjson.loads(client.call("GET", f"{_PODS}?fieldSelector=spec.nodeName=&limit=1"))["items"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all pods were bound within {_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def _pod(name: str) -> bytes:
    pod = share(name, core=20, mib=4096)
    return orjson.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]})


def main() -> None:
    assets = Path(os.environ.get(ASSETS, ""))
    if not (assets / "kube-scheduler").is_file():
        print(f"not run: {ASSETS} names no directory with a kube-scheduler")
        return
    nodes, pods, rounds = (int(word) for word in (sys.argv[1:4] + ["500", "400", "4"][len(sys.argv[1:4]) :]))
    roots = [Path(word).resolve() for word in sys.argv[4:]] or [Path.cwd()]
    with ExitStack() as stack:
        setups = _setups(stack, assets, roots)
        wanted = os.environ.get("SETUPS", "")
        setups = [s for s in setups if not wanted or any(s.name.startswith(w) for w in wanted.split(","))]
        for server in {id(setup.server): setup.server for setup in setups}.values():
            add_nodes(server, nodes)
        time.sleep(3)
        found: dict[str, list[Turn]] = {}
        for number in range(rounds):
            for setup in setups:
                one = turn(assets, setup, number, pods)
                print(f"{setup.name:24} {one.rate:6.1f} pods/s", flush=True)
                found.setdefault(setup.name, []).append(one)
                time.sleep(1)
    print(f"{nodes} nodes, {pods} pods, {rounds} rounds")
    for name, turns in found.items():
        _show(name, turns)


def _show(name: str, turns: Sequence[Turn]) -> None:
    rates = [t.rate for t in turns]
    cpu = {key: statistics.median(t.cpu[key] for t in turns) for key in turns[0].cpu}
    parts = "  ".join(f"{key} {value:.1f}" for key, value in cpu.items())
    create = statistics.median(t.create_ms for t in turns)
    spread = f"({min(rates):.0f}..{max(rates):.0f})"
    print(f"{name:24} {statistics.median(rates):6.1f} pods/s {spread:12} create {create:5.1f} ms  CPU ms/pod: {parts}")


def _setups(stack: ExitStack, assets: Path, roots: Sequence[Path]) -> list[Setup]:
    plain = stack.enter_context(plain_server(assets))
    setups = [Setup("nothing", plain), Setup("nothing, 100 %", plain, percentage=100)]
    noop = stack.enter_context(noop_extender())
    for root in roots:
        cluster = stack.enter_context(MgpuCluster(str(assets), root))
        server = cluster.server
        name = f" {root.name}" if len(roots) > 1 else ""
        setups += [
            Setup(f"webhooks{name}", server),
            Setup(f"no-op{name}", server, noop, percentage=100),
            Setup(f"mgpu{name}", server, cluster.extender_url, percentage=100),
            Setup(f"default-no-op{name}", server, noop),
            Setup(f"default-mgpu{name}", server, cluster.extender_url),
        ]
    return setups


_NOOP = """
import socket, sys, threading
import orjson
def serve(peer):
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    while True:
        while b"\\r\\n\\r\\n" not in data:
            more = peer.recv(1 << 18)
            if not more: return
            data += more
        head, _, body = data.partition(b"\\r\\n\\r\\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\\r\\n")[0])
        parts = [body]; have = len(body)
        while have < length:
            more = peer.recv(1 << 18)
            if not more: return
            parts.append(more); have += len(more)
        body = b"".join(parts)
        body, data = body[:length], body[length:]
        names = orjson.loads(body).get("NodeNames") or []
        if head.startswith(b"POST /filter"):
            answer = {"NodeNames": names, "FailedNodes": {}}
        else:
            answer = [{"Host": name, "Score": 0} for name in names]
        out = orjson.dumps(answer)
        head = "HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"
        peer.sendall((head % len(out)).encode() + out)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


@contextmanager
def noop_extender() -> Iterator[str]:
    """Run an extender that lets every node pass, with as little work as Python allows."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        process = Process("no-op", [sys.executable, "-c", _NOOP, str(port)], Path(name) / "log", os.environ)
        process.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stop()


if __name__ == "__main__":
    main()
