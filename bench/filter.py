"""`filter` and `prioritize` over HTTP, with 8 cards and 8 pods per node.

The verbs are called in turn, as kube-scheduler does: `prioritize` gets the nodes that `filter` has named, and is not
called for a single one. The no-op extender reads the names of the nodes and returns the same answers. What it takes is
the cost of HTTP and JSON on this machine. Before each `filter` of mgpu a new pod is added to a random node. The
`filter` of the peer (`bench.peer`) also chooses the node and writes the cards to the pod; it has no `prioritize`.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import orjson

from bench.clusters import running
from bench.peer import peer
from bench.rows import Options, Row
from bench.serving import Client, cluster, quantiles
from scheduler.cluster.forecast import LEARNING_POLICIES
from tests import builders as b

NODES = (100, 1_000, 5_000)
CALLS = 60
FIRST_PODS = 50
BASE = "binpack"
VERBS = ("filter", "prioritize")


class Case(NamedTuple):
    """A request for a share of a card.

    Attributes:
        core: The requested percentage of a card's compute.
        fresh: Whether the requested memory differs in each call, so that the filter has no cached answer.
    """

    title: str
    core: int
    mib: int
    fresh: bool = True


CASES = (
    Case("fits nearly everywhere", 20, 4096),
    Case("fits on half of the nodes", 80, 4096),
    Case("the same request each time", 80, 4096, fresh=False),
    Case("fits nearly nowhere", 99, 79 * 1024),
)


def rows(options: Options) -> Iterator[Row]:
    for nodes in options.sizes(*NODES):
        with peer(nodes) as other:
            of_peer = {case: other.filter(nodes, case.core, case.mib) for case in CASES} if other else {}
        with cluster(nodes) as client:
            for case in CASES:
                yield from _case(client, nodes, case, options.repeats(CALLS), of_peer.get(case))
        yield from _first_pods(nodes, options.repeats(FIRST_PODS))


def _first_pods(nodes: int, count: int) -> Iterator[Row]:
    """Measure both verbs for pods of which each is the first of its kind, with each policy that learns and binpack.

    A policy that learns rates all nodes for such a pod. Calls of the policies take turns.
    """
    names = [f"node-{i}" for i in range(nodes)]
    with ExitStack() as stack:
        clients = {policy: stack.enter_context(cluster(nodes, policy=policy)) for policy in (BASE, *LEARNING_POLICIES)}
        calls = {policy: _Calls(client) for policy, client in clients.items()}
        for i in range(count):
            body = {"Pod": b.share("p", 20, 4096 + i), "NodeNames": names}
            for policy, client in clients.items():
                client.post("/changed", {"pod": running(f"first-{i}", random.Random(i).randrange(nodes), i)})
                calls[policy].call(body)
        cpu = {policy: of_policy.cpu_each(VERBS) for policy, of_policy in calls.items()}
    for policy in LEARNING_POLICIES:
        what = f"{nodes:,} nodes, filter and prioritize, first pod of its kind, {policy}, CPU"
        late = f"p50 {quantiles(calls[policy].wall(VERBS))[0]:.2f} ms"
        yield Row(what=what, value=cpu[policy], unit="ms CPU", reference=cpu[BASE], reference_name=BASE, remark=late)


def _case(client: Client, nodes: int, case: Case, count: int, of_peer: tuple[float, float] | None) -> Iterator[Row]:
    """Measure both verbs. Calls of mgpu and of the no-op extender take turns.

    Args:
        of_peer: The median duration and the CPU time of the peer's `filter`, which does what both verbs do.
    """
    names = [f"node-{i}" for i in range(nodes)]
    real, noop = _Calls(client), _Calls(client, "/noop")
    for i in range(count):
        client.post("/changed", {"pod": running(f"{case.title}-{i}", random.Random(i).randrange(nodes), i)})
        body: dict[str, Any] = {"Pod": b.share("p", case.core, case.mib + (i if case.fresh else 0)), "NodeNames": names}
        answer = real.call(body)
        noop.call(body)
    named = len(orjson.loads(answer)["NodeNames"])
    for verbs in (("filter",), ("prioritize",), VERBS) if named > 1 else (("filter",),):
        what, is_all = f"{nodes:,} nodes, {' and '.join(verbs)}, {case.title}", verbs[-1] == VERBS[-1] or named <= 1
        (p50, p99), (noop50, noop99) = quantiles(real.wall(verbs)), quantiles(noop.wall(verbs))
        peer50, peer_cpu = of_peer if of_peer and is_all and verbs[0] == VERBS[0] else (None, None)
        late = f"p99 {p99:.2f}, no-op {noop99:.2f}"
        said = f"answer of filter {len(answer) >> 10} KiB, {named:,} nodes"
        cpu, noop_cpu = real.cpu_each(verbs), noop.cpu_each(verbs)
        yield Row(what=f"{what}, p50", value=p50, unit="ms", reference=noop50, peer=peer50, remark=late)
        yield Row(what=f"{what}, CPU", value=cpu, unit="ms CPU", reference=noop_cpu, peer=peer_cpu, remark=said)


class _Calls:
    """Calls of both verbs for one pod after the other: their milliseconds, and the CPU milliseconds of the server."""

    def __init__(self, client: Client, prefix: str = "") -> None:
        self._client, self._prefix = client, prefix
        self._wall = {verb: list[float]() for verb in VERBS}
        self._cpu = {verb: list[float]() for verb in VERBS}

    def call(self, body: dict[str, Any]) -> bytes:
        """Return the answer of `filter`."""
        answer = self._timed("filter", body)
        names = orjson.loads(answer)["NodeNames"]
        if len(names) > 1:
            self._timed("prioritize", {**body, "NodeNames": names})
        return answer

    def _timed(self, verb: str, body: dict[str, Any]) -> bytes:
        before = self._client.cpu()
        took, answer = self._client.timed(f"{self._prefix}/{verb}", body)
        self._cpu[verb].append(self._client.cpu() - before)
        self._wall[verb].append(took)
        return answer

    def wall(self, verbs: Sequence[str]) -> list[float]:
        return [sum(of_pod) for of_pod in zip(*(self._wall[verb] for verb in verbs), strict=True)]

    def cpu_each(self, verbs: Sequence[str]) -> float:
        """Return the sum of the medians, because background work of the server, such as a refresh, is in few calls."""
        return sum(quantiles(self._cpu[verb])[0] - self._client.cpu_of_asking() for verb in verbs)
