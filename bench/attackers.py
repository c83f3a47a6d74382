"""The hostile load of `bench.hostile`: five attacks of one tenant, each in a loop at a fixed rate on its own thread."""

import http.client
import json
import multiprocessing
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mgpu.kube import Api, ApiError
from tests.builders import container, mtgpupod, share

PODS = "/api/v1/namespaces/{}/pods"
HARD_PODS, HARD_CONTAINERS = 16, 30
WIDE_BYTES = 1_200_000
POST_BYTES = 8 << 20
IDLE_CONNECTIONS = 100
SOURCE = ("127.0.0.2", 0)
"""The address from which the attacker connects. As in a cluster, it differs from the API server's address."""


@dataclass(frozen=True, slots=True)
class Target:
    """The attacked cluster. `admission` has the port and the URL path of each admission endpoint."""

    kubeconfig: str
    admission: tuple[tuple[int, str], ...]


@contextmanager
def attacking(target: Target, names: Sequence[str]) -> Iterator[None]:
    """Run these attacks in another process, so that their work does not delay the measuring threads."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    process = context.Process(target=_attack, args=(target, tuple(names), over), daemon=True)
    process.start()
    try:
        yield
        if not process.is_alive():
            raise RuntimeError(f"the attackers ended early, exit code {process.exitcode}")
    finally:
        over.set()
        process.join(60)
        process.kill()


def _attack(target: Target, names: Sequence[str], over: Any) -> None:
    """Run these attacks until `over` is set or one of them fails. An attack that fails ends the process."""
    stopped = threading.Event()
    with ThreadPoolExecutor(len(names)) as attackers:
        running = [attackers.submit(ATTACKS[name], target, stopped) for name in names]
        while not over.wait(0.5) and not any(one.done() for one in running):
            pass
        stopped.set()
    for one in running:
        one.result()


def _turns(stopped: threading.Event, seconds: float) -> Iterator[int]:
    """Yield 0, 1, … until `stopped` is set, at most one number in this many seconds."""
    turn, due = 0, time.monotonic()
    while not stopped.wait(max(0.0, due - time.monotonic())):
        yield turn
        turn, due = turn + 1, max(due + seconds, time.monotonic())


@contextmanager
def _connected(target: Target) -> Iterator[Api]:
    api = Api.connect(target.kubeconfig, timeout=30.0)
    try:
        yield api
    finally:
        api.close()


def _no_trust() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _hard_pods(target: Target, stopped: threading.Event) -> None:
    """Keep sixteen pending pods with thirty different containers each. Replace one every two seconds."""
    random_ = random.Random(1)
    with _connected(target) as api:
        path = PODS.format("hostile")
        for turn in _turns(stopped, 2.0):
            name = f"hard-{turn % HARD_PODS}"
            with suppress(ApiError):
                api.delete(f"{path}/{name}", {"gracePeriodSeconds": 0})
            asked = [(random_.randint(1, 60), random_.randint(256, 40_000)) for _ in range(HARD_CONTAINERS)]
            containers = [container(f"c{i}", core, mib) for i, (core, mib) in enumerate(asked)]
            with suppress(ApiError):
                api.create(path, {"metadata": {"name": name}, "spec": {"containers": containers}})


def _wide_objects(target: Target, stopped: threading.Event) -> None:
    """Create an object of about a megabyte every second, and delete it if it was admitted.

    The objects are pods with a long environment, many containers or many slices, and MtgpuPods.
    """
    environment = [{"name": f"V{i}", "value": "x" * 80} for i in range(WIDE_BYTES // 120)]
    small = [container(f"c{i}", 1, 256) for i in range(WIDE_BYTES // 400)]
    slices = [
        {"name": f"c{i}", "image": "cuda", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
        for i in range(WIDE_BYTES // 300)
    ]
    specs = [
        {"containers": [container("c", 1, 256, env=environment)]},
        {"containers": small},
        {"containers": slices},
    ]
    wide = mtgpupod("wide", namespace="hostile", node="n0")
    wide["spec"]["containers"] = [{"name": "c", "image": "x", "env": environment}]
    with _connected(target) as api:
        pods, mtgpupods = PODS.format("hostile"), "/apis/lsalab.nthu/v1/namespaces/hostile/mtgpupods"
        for turn in _turns(stopped, 1.0):
            raw = {"metadata": {"name": "wide"}, "spec": specs[turn % 4]} if turn % 4 < 3 else _fresh(wide)
            path = pods if turn % 4 < 3 else mtgpupods
            with suppress(ApiError):
                api.create(path, raw)
                api.delete(f"{path}/wide", {"gracePeriodSeconds": 0})


def _fresh(raw: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in raw["metadata"].items() if key != "uid"}
    return {**raw, "metadata": metadata, "status": {}}


def _flood(target: Target, stopped: threading.Event) -> None:
    """Create ten small pods a second, and delete each at once."""
    with _connected(target) as api:
        path, spec = PODS.format("hostile"), share("f", core=20, mib=4096)["spec"]
        for turn in _turns(stopped, 0.1):
            with suppress(ApiError):
                api.create(path, {"metadata": {"name": f"flood-{turn}"}, "spec": spec})
                api.delete(f"{path}/flood-{turn}", {"gracePeriodSeconds": 0})


def _large_posts(target: Target, stopped: threading.Event) -> None:
    """Send a review of a pod with 8 MiB every second, to one admission endpoint after the other.

    The reviews do not pass the API server, which would limit their size.
    """
    one = len(json.dumps(container("c00000", 1, 256))) + 2
    containers = [container(f"c{i:05}", 1, 256) for i in range((POST_BYTES - 1024) // one)]
    pod = {"metadata": {"name": "p"}, "spec": {"containers": containers}}
    request = {"uid": "u", "operation": "CREATE", "namespace": "hostile", "object": pod}
    request |= {
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"version": "v1", "resource": "pods"},
    }
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    body, headers = json.dumps(review).encode(), {"Content-Type": "application/json"}
    trust = _no_trust()
    for turn in _turns(stopped, 1.0):
        port, path = target.admission[turn % len(target.admission)]
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, source_address=SOURCE, context=trust)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, headers)
            connection.getresponse().read()


def _idle_connections(target: Target, stopped: threading.Event) -> None:
    """Open a hundred connections to each admission port every second, send nothing, and close the earlier ones."""
    sockets: list[socket.socket] = []
    ports = sorted({port for port, _ in target.admission})
    for _ in _turns(stopped, 1.0):
        for connection in sockets:
            connection.close()
        sockets.clear()
        for port in ports * IDLE_CONNECTIONS:
            with suppress(OSError):
                sockets.append(socket.create_connection(("127.0.0.1", port), timeout=1, source_address=SOURCE))
    for connection in sockets:
        connection.close()


ATTACKS: Mapping[str, Callable[[Target, threading.Event], None]] = {
    "hard": _hard_pods,
    "wide": _wide_objects,
    "flood": _flood,
    "posts": _large_posts,
    "connections": _idle_connections,
}
