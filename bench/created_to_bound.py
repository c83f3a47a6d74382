"""Pods that a real kube-scheduler binds per second: with mgpu, with a no-op extender, and in a cluster without both.

The setups take turns. Each turn starts a kube-scheduler, creates pods over several connections, and waits until all of
them are bound. There is no kubelet. The no-op extender runs beside mgpu's webhooks, which decide the cards then, too.

On a machine with few cores the processes compete for them, so the rate tells how much CPU time they need together. The
CPU time of mgpu's processes is measured too, because it varies less.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench.control_plane import (
    SECONDS,
    Server,
    add_nodes,
    bare_extender,
    kube_scheduler,
    mgpu_server,
    plain_server,
    spread,
)
from bench.node import cpu_seconds
from bench.rows import Options, Row, Skipped
from playground.cluster import ASSETS
from tests.builders import share

NODES, PODS, ROUNDS = 500, 300, 5
_PATH = "/api/v1/namespaces/default/pods"
_POLL_SECONDS = 0.2
"""Each list takes some 10 ms of the API server and etcd, so that more of them would slow down what is measured."""
_SETTLE_SECONDS = 3.0
_EXTENDER = "no-op extender"


@dataclass(frozen=True, slots=True)
class Setup:
    """A way in which pods are bound. The arguments of `bench.control_plane.kube_scheduler` are explained there."""

    name: str
    server: Server
    extender: str | None = None
    percentage: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn has measured.

    Attributes:
        rate: Pods per second, from the first creation to the last binding.
        create_ms: The median time of a creation.
        cpu: CPU milliseconds per pod by process.
    """

    rate: float
    create_ms: float
    cpu: Mapping[str, float]


def rows(options: Options) -> Iterator[Row]:
    assets = Path(os.environ.get(ASSETS, ""))
    if not os.environ.get(ASSETS) or not (assets / "kube-scheduler").is_file():
        raise Skipped(f"{ASSETS} names no directory with etcd, kube-apiserver and kube-scheduler")
    for nodes in options.sizes(NODES):
        yield from _rows_of(nodes, run(assets, nodes, PODS, options.repeats(ROUNDS)))


def run(assets: Path, nodes: int, pods: int, rounds: int) -> Mapping[str, Sequence[Turn]]:
    """Measure all setups in turns. Return the turns of each."""
    found: dict[str, list[Turn]] = {}
    with ExitStack() as stack:
        setups = _setups(stack, assets)
        for server in {setup.server.url: setup.server for setup in setups}.values():
            add_nodes(server, nodes)
        time.sleep(_SETTLE_SECONDS)
        for number in range(rounds):
            for setup in setups:
                found.setdefault(setup.name, []).append(_turn(assets, setup, number, pods))
    return found


def _setups(stack: ExitStack, assets: Path) -> list[Setup]:
    plain = stack.enter_context(plain_server(assets))
    server, extender = stack.enter_context(mgpu_server(assets))
    noop, pid = stack.enter_context(bare_extender())
    server.pids[_EXTENDER] = [pid]
    return [
        Setup("without mgpu", plain),
        Setup("without mgpu, all nodes", plain, percentage=100),
        Setup("webhooks only", server),
        Setup("no-op, all nodes", server, noop, percentage=100),
        Setup("mgpu, all nodes", server, extender, percentage=100),
        Setup("no-op, sample", server, noop),
        Setup("mgpu, sample", server, extender),
    ]


def _turn(assets: Path, setup: Setup, number: int, pods: int) -> Turn:
    """Create pods, and wait until they are bound. The pods are deleted afterwards."""
    client = setup.server.client()
    with kube_scheduler(assets, setup.server, setup.extender, setup.percentage) as process:
        bodies = [_pod(f"p{number}-{i}") for i in range(pods)]
        pids = {**setup.server.pids, "kube-scheduler": [process.pid]}
        before = {name: sum(map(cpu_seconds, group)) for name, group in pids.items()}
        began = time.perf_counter()
        took = spread(setup.server, pods, lambda one, i: one.call("POST", _PATH, bodies[i]))
        _wait_bound(setup.server)
        seconds = time.perf_counter() - began
        used = {name: sum(map(cpu_seconds, group)) - before[name] for name, group in pids.items()}
    client.call("DELETE", f"{_PATH}?gracePeriodSeconds=0")
    return Turn(
        pods / seconds, 1000 * statistics.median(took), {name: 1000 * value / pods for name, value in used.items()}
    )


def _wait_bound(server: Server) -> None:
    """Wait until all pods have a node. Poll, since the API server ends a watch that a busy process reads too late."""
    client = server.client()
    deadline = time.monotonic() + SECONDS
    while orjson.loads(client.call("GET", f"{_PATH}?fieldSelector=spec.nodeName=&limit=1"))["items"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all pods were bound within {SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def _pod(name: str) -> bytes:
    pod = share(name, core=20, mib=4096)
    return orjson.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]})


def _rows_of(nodes: int, found: Mapping[str, Sequence[Turn]]) -> Iterator[Row]:
    """Yield the rate of each setup. The reference of mgpu is the no-op extender, that of the others no mgpu at all."""
    without = statistics.median(turn.rate for turn in found["without mgpu"])
    for name, turns in found.items():
        rate = statistics.median(turn.rate for turn in turns)
        noop = found.get(name.replace("mgpu,", "no-op,")) if name.startswith("mgpu") else None
        reference = statistics.median(turn.rate for turn in noop) if noop else without
        yield Row(
            what=f"{nodes:,} nodes, {name}",
            value=rate,
            unit="pods/s",
            reference=reference,
            reference_name="no-op" if noop else "without mgpu",
            more_is_better=True,
            remark=_remark(turns, rate / without),
        )
    for process in found["mgpu, all nodes"][0].cpu:
        of_mgpu, of_noop = (_cpu(found[name], process) for name in ("mgpu, all nodes", "no-op, all nodes"))
        if process != _EXTENDER:
            what = f"{nodes:,} nodes, all nodes, {process}, CPU per pod"
            yield Row(what=what, value=of_mgpu, unit="ms CPU", reference=of_noop)


def _remark(turns: Sequence[Turn], of_without: float) -> str:
    rates = [turn.rate for turn in turns]
    create = statistics.median(turn.create_ms for turn in turns)
    return f"{min(rates):.0f} to {max(rates):.0f}; create {create:.0f} ms; {of_without:.2f} of a cluster without mgpu"


def _cpu(turns: Sequence[Turn], process: str) -> float:
    return statistics.median(turn.cpu[process] for turn in turns)
