"""Runs two replicas of the scheduler behind a proxy that connects to the labelled one, as a Service does.

`test_losses` uses it.
"""

import contextlib
import os
import select
import signal
import socket
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mgpu.kube.leader import LABEL
from playground.cluster import Cluster
from playground.processes import Process, free_port
from tests.waiting import until

PODS = "/api/v1/namespaces/mgpu-system/pods"


class Replica:
    """One replica of the scheduler, on ports of its own."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        one = cluster.processes["scheduler"]
        command = [word for word in one.command if word != "--no-leader-elect"]
        self.ports = {flag: free_port() for flag in command if flag.endswith("-port")}
        for flag, port in self.ports.items():
            command[command.index(flag) + 1] = str(port)
        self.name, self._api = name, cluster.api
        uid = cluster.api.create(PODS, _pod(name))["metadata"]["uid"]
        environ = {**one.environ, "MGPU_SCHEDULER__PODUID": uid}
        self.process = Process(name, command, cluster.logs / f"{name}.log", environ)

    @property
    def leads(self) -> bool:
        return self.process.running and self._says("leads")

    @property
    def labelled(self) -> bool:
        return LABEL in self._api.get(f"{PODS}/{self.name}")["metadata"]["labels"]

    @property
    def up(self) -> bool:
        return self._says("healthz")

    def _says(self, probe: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['--extender-port']}/{probe}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


def _pod(name: str) -> dict[str, Any]:
    """Return the Pod that stands in for the process. It is never scheduled."""
    labels = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "scheduler"}
    spec = {"schedulerName": "nobody", "containers": [{"name": "c", "image": "mgpu"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


class Replicas:
    """Both replicas. They replace the cluster's scheduler within `replicated`."""

    def __init__(self, cluster: Cluster) -> None:
        self.all = [Replica(cluster, f"scheduler-{i}") for i in range(2)]
        self.killed: Replica | None = None

    def reached(self) -> list[Replica]:
        return [replica for replica in self.all if replica.process.running and replica.labelled]

    def leading(self) -> list[Replica]:
        return [replica for replica in self.all if replica.leads]

    def leader(self) -> Replica:
        """Return the leader, as soon as it is the replica with the label."""
        found: list[Replica] = []

        def one_leads() -> bool:
            found[:] = self.leading()
            return bool(found) and self.reached() == found

        until(one_leads, 60)
        return found[0]

    def kill_leader(self) -> None:
        """Kill the leader. The other one may lead 15 s after it last saw the lease change, whatever the lease says.

        Store the replica in `killed`: on a busy machine the lease may have moved since the caller looked.
        """
        self.killed = self.leader()
        os.killpg(self.killed.process.pid, signal.SIGKILL)


@contextmanager
def replicated(cluster: Cluster) -> Iterator[Replicas]:
    """Start two replicas at the addresses of the cluster's scheduler, and start that scheduler again at the end."""
    one = cluster.processes["scheduler"]
    at = {flag: int(one.command[one.command.index(flag) + 1]) for flag in ("--port", "--extender-port")}
    one.stop()
    made = Replicas(cluster)
    with ExitStack() as stack:
        stack.callback(cluster.restart, "scheduler")
        for replica in made.all:
            stack.callback(cluster.api.delete, f"{PODS}/{replica.name}")
        for replica in made.all:
            stack.callback(replica.process.stop)
            replica.process.start()
        for replica in made.all:
            replica.process.wait("up", lambda replica=replica: replica.up, 60)  # type: ignore[misc]
        for flag, port in at.items():
            stack.enter_context(_service(port, lambda flag=flag: [r.ports[flag] for r in made.reached()]))  # type: ignore[misc]
        made.leader()
        yield made


@contextmanager
def _service(port: int, backends: Callable[[], list[int]]) -> Iterator[None]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for backend in backends()[:1]:
                    _forward(self.request, stack.enter_context(socket.create_connection(("127.0.0.1", backend))))

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


def _forward(client: socket.socket, backend: socket.socket) -> None:
    """Copy bytes in both directions until either side closes."""
    other = {client: backend, backend: client}
    while True:
        for one in select.select([client, backend], [], [])[0]:
            data = one.recv(1 << 16)
            if not data:
                return
            other[one].sendall(data)
