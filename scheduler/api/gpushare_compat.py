"""Serves the HTTP paths of gpushare's scheduler extender, so that its users need not change their configuration.

The callers are kube-schedulers that are configured for gpushare's extender, and tools that read `/inspect`
(docs/design/gpushare.md, "Extender"). gpushare has defined the paths and the format, so they must not change. `api.app`
calls `gpushare_routes`.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import orjson
from flask import Flask, Response

from mgpu.dialects import gpushare
from mgpu.model.cards import Card, CardState
from mgpu.model.ledger import Holding
from mgpu.serving.app import serve_posts
from mgpu.serving.review import BadRequest
from scheduler.api.extender import Extender, posted
from scheduler.api.replica import Replica
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache

_PREFIX = "/gpushare-scheduler"


def gpushare_routes(app: Flask, extender: Extender, replica: Replica) -> None:
    """Add gpushare's paths to the app of the extender."""
    state = replica.state
    settings = replica.settings
    for verb in (extender.filter, extender.prioritize, extender.bind):
        view = posted(verb, settings.scheduler.extender_timeout_seconds)
        serve_posts(app, f"{_PREFIX}/{verb.__name__}", view)

    def inspect(node: str = "") -> Response:
        replica.may_answer()
        if node and not state.cards_and_holdings(node):
            raise BadRequest(404, f"there is no node {node}")
        names = (node,) if node else state.nodes_with_cards()
        return Response(_inspected(names, state, gpushare.unit_bytes(settings)), mimetype="application/json")

    app.add_url_rule(f"{_PREFIX}/inspect", "gpushare inspect", inspect)
    app.add_url_rule(f"{_PREFIX}/inspect/<node>", "gpushare inspect one", inspect)
    app.add_url_rule("/version", "version", lambda: Response(version("mgpu"), mimetype="text/plain"))


def _inspected(names: Iterable[str], state: ClusterCache, unit: int) -> Iterator[bytes]:
    """Yield the answer node by node, so that the answer of a large cluster is never in memory as a whole."""
    pace = Pace(pause_ratio=1)
    separator = b""
    yield b'{"nodes":['
    for name in names:
        if contents := state.cards_and_holdings(name):
            yield separator + orjson.dumps(_node(name, *contents, unit))
            separator = b","
        pace()
    yield b"]}"


def _node(name: str, cards: tuple[CardState, ...], holdings: tuple[Holding, ...], unit: int) -> dict[str, Any]:
    """Return a node in units of `gpu-mem`. The memory that pods of any vocabulary hold is rounded up to whole units.

    All memory of a card with a GPUID counts as used, because no pod that requests `gpu-mem` gets any of it.
    """
    devices = [
        {
            "id": state.card.index,
            "totalGPU": state.card.memory // unit,
            "usedGPU": gpushare.held_units(state.memory_taken, state.card, unit),
            "pods": [_pod(holding, state.card, unit) for holding in holdings if holding.is_on(state.card)],
        }
        for state in cards
    ]
    return {
        "name": name,
        "totalGPU": sum(device["totalGPU"] for device in devices),
        "usedGPU": sum(device["usedGPU"] for device in devices),
        "devs": devices,
    }


def _pod(holding: Holding, card: Card, unit: int) -> dict[str, Any]:
    used = gpushare.held_units(holding.uses(card).memory, card, unit)
    return {"name": holding.name, "namespace": holding.namespace, "usedGPU": used}
