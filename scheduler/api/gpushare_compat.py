"""The extender under the paths of gpushare's own, so that a scheduler configured for that one is served unchanged, and
its `/inspect` (docs/design/gpushare.md, "Extender").
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
    """Add them to the extender's app."""
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
    """Yield the answer node by node: that of a large cluster, with all its pods, is never in memory as a whole."""
    pace, before = Pace(rests=1), b'{"nodes":['
    for name in names:
        if seen := state.cards_and_holdings(name):
            yield before + orjson.dumps(_node(name, *seen, unit))
            before = b","
        pace()
    yield b"]}" if before == b"," else before + b"]}"


def _node(name: str, cards: tuple[CardState, ...], holdings: tuple[Holding, ...], unit: int) -> dict[str, Any]:
    """A node in units of `gpu-mem`, whatever vocabulary its pods use; what they hold is rounded up.

    A card with a GPUID is used up: nobody who asks for `gpu-mem` gets any of it.
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
