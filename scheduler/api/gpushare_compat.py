"""The HTTP paths of gpushare's scheduler extender, served by mgpu's own code.

A kube-scheduler that is configured for gpushare's extender works unchanged, and so do tools that read its `/inspect`
(docs/design/gpushare.md, "Extender"). The format is gpushare's; do not change it.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import orjson
from flask import Flask, Response

from mgpu.dialects import gpushare
from mgpu.model.cards import Card, CardState
from mgpu.model.ledger import Holding
from mgpu.serving.review import BadRequest
from mgpu.settings import Settings
from scheduler.api.extender import Extender, Gate, posted
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache

_PREFIX = "/gpushare-scheduler"


def gpushare_routes(app: Flask, extender: Extender, state: ClusterCache, settings: Settings, gate: Gate) -> None:
    """Add gpushare's paths to the app of the extender."""
    for verb in (extender.filter, extender.prioritize, extender.bind):
        app.add_url_rule(
            f"{_PREFIX}/{verb.__name__}",
            f"gpushare {verb.__name__}",
            posted(verb, settings.scheduler.extender_timeout_seconds),
            methods=["POST"],
        )

    def inspect(node: str = "") -> Response:
        gate.may_answer()
        if node and not state.cards_and_holdings(node):
            raise BadRequest(404, f"there is no node {node}")
        names = (node,) if node else state.nodes_with_cards()
        return Response(_inspected(names, state, gpushare.unit(settings)), mimetype="application/json")

    app.add_url_rule(f"{_PREFIX}/inspect", "gpushare inspect", inspect)
    app.add_url_rule(f"{_PREFIX}/inspect/<node>", "gpushare inspect one", inspect)
    app.add_url_rule("/version", "version", lambda: Response(version("mgpu"), mimetype="text/plain"))


def _inspected(names: Iterable[str], state: ClusterCache, unit: int) -> Iterator[bytes]:
    """Yield the answer node by node, so that the answer of a large cluster is never in memory as a whole."""
    pace = Pace(rests=1)
    before = b'{"nodes":['
    for name in names:
        if seen := state.cards_and_holdings(name):
            yield before + orjson.dumps(_node(name, *seen, unit))
            before = b","
        pace()
    yield b"]}" if before == b"," else before + b"]}"


def _node(name: str, cards: tuple[CardState, ...], holdings: tuple[Holding, ...], unit: int) -> dict[str, Any]:
    """Return a node in units of `gpu-mem`. What pods of any vocabulary hold is rounded up to whole units.

    A card with a GPUID counts as used up, since no pod that requests `gpu-mem` gets any of it.
    """
    devices = [
        {
            "id": state.card.index,
            "totalGPU": state.card.memory // unit,
            "usedGPU": gpushare.units_of(state.memory_taken, state.card, unit),
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
    used = gpushare.units_of(holding.uses(card).memory, card, unit)
    return {"name": holding.name, "namespace": holding.namespace, "usedGPU": used}
