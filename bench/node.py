"""Provides a node for benchmarks.

The node agent is a process of its own. The API server and the kubelet are the playground's and run in this process.
`bench.allocate` and `bench.starts` use the node. Other sections only measure processes with `cpu_seconds`,
`rss_mib` and `workers`.
"""

import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu.kube import Api
from playground.apiserver import ApiServer, User, running, write_kubeconfig
from playground.processes import free_port
from tests.builders import container, pod
from tests.deviceplugin.node import CRD, Node, api_of
from tests.waiting import until

CARDS = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """A node with its API server. `folder` is the kubelet's directory, and `agent` the agent's process ID."""

    node: Node
    api: Api
    folder: Path
    agent: int


@contextmanager
def bench() -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name,
        running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url,
    ):
        folder = Path(name)
        api = api_of(url)
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
        node = Node(url, folder, [{"count": CARDS, "memory": "80Gi"}])
        write_kubeconfig(folder / "kubeconfig", url, b"", "admin")
        port = free_port()
        agent = subprocess.Popen(_command(folder, port), stderr=subprocess.DEVNULL)
        try:
            until(lambda: _ready(port) and node.healthy_ids(), 60)
            yield Bench(node, api, folder, agent.pid)
        finally:
            agent.terminate()
            agent.wait(30)
            node.close()
            api.close()


def record(card: int) -> dict[str, str]:
    return {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(card)}


def share(name: str, node: str = "", annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a pod that requests 4 % of the core and 256 MiB of the memory of a card."""
    raw = pod(name, container("c", 4, 256), annotations=annotations, node=node)
    del raw["metadata"]["uid"]
    return raw


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def workers(parent: int) -> list[int]:
    """Return the process IDs of the children of a process."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _command(folder: Path, port: int) -> list[str]:
    run = [sys.executable, "-m", "mgpu.cli.main", "deviceplugin", "--node", "n1", "--cards", str(folder / "cards.yaml")]
    where = ["--kubelet-dir", str(folder), "--cdi-dir", str(folder / "cdi")]
    return [*run, *where, "--kubeconfig", str(folder / "kubeconfig"), "--health-port", str(port)]


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False
