"""Measures `filter` and `prioritize` over HTTP with 100, 1,000 and 5,000 nodes × 8 cards and 8 pods per node.

`make bench` and `python -m bench.filter` run it.

The same run measures a no-op extender, which reads the names of the nodes and returns the same answer. Its duration is
the cost of HTTP and JSON on this machine. Before each call of mgpu a new pod is added to a random node.
"""

import random
from typing import NamedTuple

import orjson

from bench.clusters import running
from bench.serving import Client, cluster, quantiles
from tests import builders as b

NODES = (100, 1_000, 5_000)
CALLS = 200


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


def main() -> None:
    print(f"filter and prioritize over HTTP, one connection, {CALLS} calls each, mostly with new requests")
    medians: dict[tuple[str, str], list[float]] = {}
    for nodes in NODES:
        with cluster(nodes) as client:
            for case in CASES:
                for verb in ("filter", "prioritize"):
                    p50, text = _measure(client, nodes, case, verb)
                    medians.setdefault((verb, case.title), []).append(p50)
                    print(f"  {nodes:5,} nodes  {verb:10} {case.title:29} {text}", flush=True)
    print(f"  growth of the median from {NODES[-2]:,} to {NODES[-1]:,} nodes ({NODES[-1] / NODES[-2]:.0f} x as many):")
    for (verb, title), found in medians.items():
        print(f"    {verb:10} {title:29} x {found[-1] / found[-2]:.1f}")


def _measure(client: Client, nodes: int, case: Case, verb: str) -> tuple[float, str]:
    names = [f"node-{i}" for i in range(nodes)]
    real: list[float] = []
    noop: list[float] = []
    fit = size = 0
    for i in range(CALLS):
        client.post("/changed", {"pod": running(f"{case.title}-{verb}-{i}", random.Random(i).randrange(nodes), i)})
        body = {"Pod": b.share("p", case.core, case.mib + (i if case.fresh else 0)), "NodeNames": names}
        took, answer = client.timed(f"/{verb}", body)
        real.append(took)
        noop.append(client.timed(f"/noop/{verb}", body)[0])
        size = len(answer)
        if verb == "filter":
            fit = len(orjson.loads(answer)["NodeNames"])
    (p50, p99), (noop50, noop99) = quantiles(real), quantiles(noop)
    rate = 1000 / (sum(real) / len(real))
    fitting = f"{fit:5,} fit " if verb == "filter" else " " * 10
    times = f"p50 {p50:5.2f}  p99 {p99:5.2f} ms  {rate:5.0f}/s"
    return p50, f"{fitting} {times}   no-op {noop50:.2f} / {noop99:.2f} ({size >> 10:3} KiB)  × {p50 / noop50:.1f}"


if __name__ == "__main__":
    main()
