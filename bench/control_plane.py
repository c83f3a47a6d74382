"""A control plane of real programs for benchmarks: etcd, kube-apiserver and kube-scheduler, with mgpu or without it.

`bench.created_to_bound` and `bench.bursts` use it. The programs are in the directory KUBEBUILDER_ASSETS. Nodes are only
objects: no kubelet and no agent runs, so that a machine with two cores can carry thousands of nodes.
"""

import json
import os
import ssl
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import yaml

from bench.node import workers
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import Node
from playground.apiserver import User, write_kubeconfig
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from playground.managed_resources import CORE, MANAGED, MEMORY
from playground.processes import Process, free_port
from playground.realapi import feature_gates, real_api_server
from tests.builders import cards

CARDS = 8
SECONDS = 240.0
"""The longest time that a turn may take."""
_CONNECTIONS = 8


class Client:
    """An HTTPS connection to an API server that reads and writes JSON bodies with little work of this process."""

    def __init__(self, url: str, ca: Path, token: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        context = ssl.create_default_context(cafile=str(ca))
        self._connection = HTTPSConnection(urlsplit(url).netloc, context=context, timeout=SECONDS)

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
        kubeconfig: The file for kube-scheduler.
        pids: The process IDs by the name under which their CPU time is reported.
    """

    url: str
    ca: Path
    token: str
    kubeconfig: Path
    pids: dict[str, list[int]]

    def client(self) -> Client:
        return Client(self.url, self.ca, self.token)


@contextmanager
def plain_server(assets: Path) -> Iterator[Server]:
    """Run an API server without webhooks, which serves Devices."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        token = "t" * 32
        with real_api_server(assets, folder, {token: User("admin", ("system:masters",))}) as (url, ca):
            kubeconfig = folder / "admin.kubeconfig"
            write_kubeconfig(kubeconfig, url, ca.read_bytes(), token)
            crd = yaml.safe_load((MANIFESTS / "crds" / "device.yaml").read_text())
            server = Server(url, ca, token, kubeconfig, _api_pids(folder))
            server.client().call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", orjson.dumps(crd))
            yield server


@contextmanager
def mgpu_server(assets: Path, components: Collection[str] = ()) -> Iterator[tuple[Server, str]]:
    """Run an API server with mgpu's webhook, scheduler and policies. The value has the URL of mgpu's extender, too.

    Args:
        components: The components of the manifests that are installed beside the base.
    """
    with Cluster([], assets=str(assets), controllers=False, components=components) as cluster:
        for policy in yaml.safe_load_all((MANIFESTS / "base" / "scheduler-policy.yaml").read_text()):
            kind = "policies" if policy["kind"].endswith("Policy") else "policybindings"
            cluster.api.create(f"/apis/admissionregistration.k8s.io/v1/validatingadmission{kind}", policy)
        folder = cluster.folder / "api"
        pids = _api_pids(folder)
        for name, process in cluster.processes.items():
            pids[name] = [process.pid, *workers(process.pid)]
        users = yaml.safe_load(cluster.kubeconfig.read_text())["users"]
        ca = next(folder.glob("*.crt"))
        server = Server(cluster.url, ca, users[0]["user"]["token"], cluster.kubeconfig, pids)
        yield server, cluster.extender_url


def _api_pids(folder: Path) -> dict[str, list[int]]:
    """Return the process IDs of the etcd and the kube-apiserver that have this folder in their command lines."""
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


def spread(server: Server, count: int, do: Callable[[Client, int], object]) -> list[float]:
    """Call `do(client, i)` for each i below `count`, over several connections. Return the seconds of each call."""
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

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(work, range(_CONNECTIONS)))
    return took


def add_nodes(server: Server, nodes: int, count: int = CARDS) -> None:
    """Create Nodes that are ready, each with a Device of `count` cards."""
    amounts = {CORE: str(100 * count), MEMORY: str(count * 80 << 10)}
    capacity = {"cpu": "640", "memory": "2Ti", "pods": "1000", **amounts}
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]}

    def add(client: Client, i: int) -> None:
        name = f"node-{i}"
        labels = {"vke.node.gpu.schedule": "mgpu", "kubernetes.io/hostname": name}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
        uid = orjson.loads(client.call("POST", "/api/v1/nodes", orjson.dumps(body)))["metadata"]["uid"]
        device = write_device(Node(name), uid, cards(count, node=name))
        client.call("POST", f"/apis/{DEVICE_API}/devices", orjson.dumps(device))

    spread(server, nodes, add)


@contextmanager
def kube_scheduler(
    assets: Path, server: Server, extender: str | None, percentage: int, *, limited: bool = False
) -> Iterator[Process]:
    """Run kube-scheduler, configured as in manifests/components/existing-scheduler, inside the context.

    Args:
        extender: The URL of the extender, or None if kube-scheduler calls none.
        percentage: `percentageOfNodesToScore`; 0 is kube-scheduler's default.
        limited: Whether its client keeps the limit of requests per second that it has by default.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        port = free_port()
        (folder / "config.yaml").write_text(json.dumps(_configuration(server, extender, percentage, limited)))
        flags = ("--config", str(folder / "config.yaml"), "--secure-port", str(port), "--bind-address", "127.0.0.1")
        gates = (f"--{flag}={value}" for flag, value in feature_gates().items())
        command = [str(assets / "kube-scheduler"), *flags, "--cert-dir", name, "--authentication-skip-lookup", *gates]
        process = Process("kube-scheduler", command, folder / "log", os.environ)
        process.start()
        try:
            process.wait("ready", lambda: _ready(port), 60)
            yield process
        finally:
            process.stop()


def _ready(port: int) -> bool:
    """Return whether kube-scheduler is ready. That of Kubernetes 1.30 has only /healthz."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for path in ("readyz", "healthz"):
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/{path}", context=context, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                return False
        except OSError:
            return False
    return False


def _configuration(server: Server, extender: str | None, percentage: int, limited: bool) -> dict[str, Any]:
    connection: dict[str, Any] = {"kubeconfig": str(server.kubeconfig)}
    if not limited:
        # By default kube-scheduler's client sends 50 requests per second, which would be the result of the measurement.
        connection |= {"qps": 5000, "burst": 10000}
    profile: dict[str, Any] = {"schedulerName": "default-scheduler"}
    if percentage:
        profile["percentageOfNodesToScore"] = percentage
    config: dict[str, Any] = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": connection,
        "profiles": [profile],
    }
    if extender:
        verbs = {f"{verb}Verb": verb for verb in ("filter", "prioritize", "preempt")}
        managed = [{"name": name, "ignoredByScheduler": ignored} for name, ignored in MANAGED.items()]
        own = {"urlPrefix": extender, "weight": 5, "nodeCacheCapable": True, "httpTimeout": "10s"}
        config["extenders"] = [{**own, **verbs, "managedResources": managed}]
    return config


@contextmanager
def bare_extender() -> Iterator[tuple[str, int]]:
    """Run `bench.bare_extender`. The value is its URL and its process ID."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        command = [sys.executable, "-m", "bench.bare_extender", str(port)]
        process = Process("no-op extender", command, Path(name) / "log", os.environ)
        process.start()
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.stop()
