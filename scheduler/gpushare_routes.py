"""The extender under the paths of gpushare's own, so that a scheduler configured for that one is served unchanged, and
its `/inspect` (gpushare.md, "Extender").
"""

from importlib.metadata import version
from typing import Any

import orjson
from flask import Flask, Response

from mgpu.dialects import gpushare
from mgpu.model.cards import Card, CardState
from mgpu.model.ledger import Holding
from mgpu.serving.review import BadRequest
from mgpu.settings import Settings
from scheduler.extender import Extender, Gate, posted
from scheduler.pacing import Pace
from scheduler.state import State

_PREFIX = "/gpushare-scheduler"


def gpushare_routes(app: Flask, extender: Extender, state: State, settings: Settings, gate: Gate) -> None:
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
        rows, pace = [], Pace(rests=1)
        for name in (node,) if node else state.nodes_with_cards():
            seen = state.seen(name)
            rows += [_node(name, *seen, gpushare.unit(settings))] if seen else []
            pace()
        if node and not rows:
            raise BadRequest(404, f"there is no node {node}")
        return Response(orjson.dumps({"nodes": rows}), mimetype="application/json")

    app.add_url_rule(f"{_PREFIX}/inspect", "gpushare inspect", inspect)
    app.add_url_rule(f"{_PREFIX}/inspect/<node>", "gpushare inspect one", inspect)
    app.add_url_rule("/version", "version", lambda: Response(version("mgpu"), mimetype="text/plain"))


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
