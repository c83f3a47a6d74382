"""The node agent on a node with 250 GPU pods: the calls of the kubelet, memory, and idle CPU.

The API server and the kubelet are the playground's and share the machine with the agent. During the calls, 250 more
pods with equal requests are bound to the node, and the kubelet does not start them. PreStartContainer is called at most
67 times a second. This is less than the 100 queries a second that a kubelet answers on its PodResources socket, since
the agent sends such a query for ids that an earlier agent gave out.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from bench.node import CARDS, Bench, bench, cpu_seconds, record, rss_mib, share
from bench.rows import Options, Row
from bench.serving import quantiles
from proto import deviceplugin_pb2 as rpc
from proto import deviceplugin_pb2_grpc as services
from tests.deviceplugin.node import PODS
from tests.waiting import until

PODS_RUNNING, PODS_WAITING, ALLOCATES, STARTS = 250, 250, 5000, 250
IDLE_SECONDS = 5.0
_START_PAUSE = 0.015


def rows(options: Options) -> Iterator[Row]:
    with bench() as made:
        yield from _calls(made, options.repeats(ALLOCATES), options.seconds(IDLE_SECONDS))


def _calls(made: Bench, allocates: int, idle_seconds: float) -> Iterator[Row]:
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
        yield from _timed(
            made, "PreStartContainer", lambda: stub.PreStartContainer(next(starts)), len(held), _START_PAUSE
        )
        ids = [f"none-{i}" for i in range(4)]
        request = rpc.AllocateRequest(container_requests=[rpc.ContainerAllocateRequest(devices_ids=ids)])
        yield from _timed(made, "Allocate", lambda: stub.Allocate(request), allocates)
        before = cpu_seconds(made.agent)
        time.sleep(idle_seconds)
        idle = (cpu_seconds(made.agent) - before) / idle_seconds
    said = f"{empty:.0f} before the first pod, {_imports_mib():.0f} with the imports alone"
    yield Row(what="memory (RSS)", value=rss_mib(made.agent), unit="MiB", remark=said)
    yield Row(what="idle, CPU per second", value=1000 * idle, unit="ms CPU")


def _imports_mib() -> float:
    run = "import sys, deviceplugin.main; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return rss_mib(process.pid)


def _timed(made: Bench, what: str, call: Callable[[], Any], times: int, pause: float = 0.0) -> Iterator[Row]:
    call_times, cpu = [], cpu_seconds(made.agent)
    for _ in range(times):
        began = time.perf_counter()
        call()
        call_times.append((time.perf_counter() - began) * 1000)
        if pause:
            time.sleep(pause)
    cpu = cpu_seconds(made.agent) - cpu
    p50, p99 = quantiles(call_times)
    said = f"p99 {p99:.2f}, longest {max(call_times):.1f}; {times} calls"
    yield Row(what=f"{what}, p50", value=p50, unit="ms", remark=said)
    yield Row(what=f"{what}, CPU of the agent", value=1000 * cpu / times, unit="ms CPU")
