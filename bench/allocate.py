"""Measures the node agent on a node with 250 GPU pods: the calls of the kubelet, memory, and idle CPU.

`make bench` and `python -m bench.allocate` run it.

The API server and the kubelet are the playground's and share the machine with the agent. During the calls, 250 more
pods with equal requests are bound to the node, and the kubelet does not start them. PreStartContainer is called at most
67 times a second. This is less than the 100 queries a second that a kubelet answers on its PodResources socket, since
the agent sends such a query for ids that an earlier agent gave out.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from bench.node import CARDS, Bench, bench, cpu_seconds, record, rss_mib, share
from proto import deviceplugin_pb2 as rpc
from proto import deviceplugin_pb2_grpc as services
from tests.deviceplugin.node import PODS
from tests.waiting import until

PODS_RUNNING, PODS_WAITING, ALLOCATES, STARTS = 250, 250, 5000, 250
IDLE_SECONDS = 5.0
_START_PAUSE = 0.015


def main() -> None:
    print(f"The node agent in a process of its own: {CARDS} cards, {PODS_RUNNING} GPU pods run, {PODS_WAITING} wait")
    with bench() as made:
        _measure(made)


def _measure(made: Bench) -> None:
    node, empty = made.node, rss_mib(made.agent)
    for i in range(PODS_RUNNING):
        made.api.create(PODS, share(f"p{i}", "n1", record(i % CARDS)))
    until(lambda: sum(c.running for c in node.runtime.containers()) == PODS_RUNNING, 120)
    socket = made.folder / "device-plugins" / "mgpu-core.sock"
    with node.kubelet.holding(), grpc.insecure_channel(f"unix:{socket}") as channel:
        for i in range(PODS_WAITING):
            made.api.create(PODS, share(f"w{i}", "n1", record(i % CARDS)))
        stub = services.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        held = [list(entry.ids) for entry in node.kubelet.devices.entries()][:STARTS]
        starts = iter([rpc.PreStartContainerRequest(devices_ids=of_one) for of_one in held])
        figures = _timed(lambda: stub.PreStartContainer(next(starts)), len(held), _START_PAUSE)
        print(f"  PreStartContainer   {figures}")
        ids = [f"none-{i}" for i in range(4)]
        request = rpc.AllocateRequest(container_requests=[rpc.ContainerAllocateRequest(devices_ids=ids)])
        print(f"  Allocate            {_timed(lambda: stub.Allocate(request), ALLOCATES)}")
        before = cpu_seconds(made.agent)
        time.sleep(IDLE_SECONDS)
        idle = (cpu_seconds(made.agent) - before) / IDLE_SECONDS
    print(
        f"  memory (RSS)        {rss_mib(made.agent):.0f} MiB; {empty:.0f} MiB before the first pod; "
        f"{_imports_mib():.0f} MiB with the imports alone"
    )
    print(f"  idle CPU            {idle * 100:.1f} % of a core")


def _imports_mib() -> float:
    run = "import sys, deviceplugin.main; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return rss_mib(process.pid)


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


if __name__ == "__main__":
    main()
