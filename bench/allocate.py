"""The node agent as a process of its own, on a node with 250 GPU pods: calls over its socket, memory, idle CPU.

The API server and the kubelet are the playground's and share the machine. Allocate is called as fast as it answers,
while 250 more pods of that amount wait; PreStartContainer below the 100 queries a second that
a kubelet answers, and it asks one each time.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from mgpu.kube import Api
from playground.apiserver import ApiServer, User, running, write_kubeconfig
from proto import deviceplugin_pb2 as rpc
from proto import deviceplugin_pb2_grpc as services
from tests.builders import container, pod
from tests.deviceplugin.node import CRD, PODS, Node, api_of, until

CARDS, PODS_RUNNING, PODS_WAITING, ALLOCATES, STARTS = 16, 250, 250, 5000, 250
IDLE_SECONDS = 5.0
_START_PAUSE = 0.015


def main() -> None:
    print(f"Node agent: a process of its own, {CARDS} cards, {PODS_RUNNING} GPU pods running, {PODS_WAITING} waiting")
    with (
        tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name,
        running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url,
    ):
        folder = Path(name)
        api = api_of(url)
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
        node = Node(url, folder, [{"count": CARDS, "memory": "80Gi"}])
        write_kubeconfig(folder / "kubeconfig", url, b"", "admin")
        port = _free_port()
        agent = subprocess.Popen(_command(folder, port), stderr=subprocess.DEVNULL)
        try:
            until(lambda: _ready(port) and node.healthy_ids(), 60)
            _measure(node, api, folder, agent.pid)
        finally:
            agent.terminate()
            agent.wait(30)
            node.close()
            api.close()


def _measure(node: Node, api: Api, folder: Path, agent: int) -> None:
    began = time.perf_counter()
    for i in range(PODS_RUNNING):
        api.create(PODS, _pod(f"p{i}", i % CARDS))
    until(lambda: sum(c.running for c in node.runtime.containers()) == PODS_RUNNING, 120)
    rate = PODS_RUNNING / (time.perf_counter() - began)
    print(f"  pods created to running        {rate:6.0f} pods/s (the kubelet admits one by one)")
    with (
        node.kubelet.holding(),
        grpc.insecure_channel(f"unix:{folder / 'device-plugins' / 'mgpu-core.sock'}") as channel,
    ):
        for i in range(PODS_WAITING):
            api.create(PODS, _pod(f"w{i}", i % CARDS))
        stub = services.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        ids = [str(i) for i in range(4)]
        request = rpc.AllocateRequest(container_requests=[rpc.ContainerAllocateRequest(devices_ids=ids)])
        print(f"  Allocate                       {_timed(lambda: stub.Allocate(request), ALLOCATES)}")
        held = [list(entry.ids) for entry in node.kubelet.devices.entries()][:STARTS]
        starts = iter([rpc.PreStartContainerRequest(devices_ids=of_one) for of_one in held])
        figures = _timed(lambda: stub.PreStartContainer(next(starts)), len(held), _START_PAUSE)
        print(f"  PreStartContainer              {figures}")
        before = _cpu_seconds(agent)
        time.sleep(IDLE_SECONDS)
        idle = (_cpu_seconds(agent) - before) / IDLE_SECONDS
    print(f"  memory (RSS)                   {_rss_mib(agent):6.0f} MiB   idle CPU {idle * 100:.1f} % of a core")


def _pod(name: str, card: int) -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(card)}
    raw = pod(name, container("c", 4, 256), annotations=record, node="n1")
    del raw["metadata"]["uid"]
    return raw


def _timed(call: Callable[[], Any], times: int, pause: float = 0.0) -> str:
    call_times = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        call_times.append(time.perf_counter() - began)
        if pause:
            time.sleep(pause)
    call_times.sort()
    p50, p99 = (call_times[int(len(call_times) * part)] * 1000 for part in (0.50, 0.99))
    return f"p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   worst {call_times[-1] * 1000:6.1f} ms   ({times} calls)"


def _command(folder: Path, port: int) -> list[str]:
    run = [sys.executable, "-m", "mgpu.cli.main", "deviceplugin", "--node", "n1", "--cards", str(folder / "cards.yaml")]
    where = ["--kubelet-dir", str(folder), "--cdi-dir", str(folder / "cdi")]
    return [*run, *where, "--kubeconfig", str(folder / "kubeconfig"), "--health-port", str(port)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    main()
