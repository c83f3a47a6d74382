"""Sums up what is really used of cards, by node, by model and by pod, and writes it as JSON.

`mgpu top` and `mgpu inspect` show the results beside what pods hold (`mgpu.presentation.utilization`). Scripts read the
keys of the JSON, so the keys must not change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.presentation.card_views import CardView, NodeView, percent
from mgpu.presentation.measured_use import (
    NOT_MEASURED,
    MeasuredUse,
    NodeUse,
    UnknownUse,
    Used,
    UseOfCards,
    add,
    use_of_cards,
)
from mgpu.presentation.utilization import UNKNOWN_MODEL

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class UseFigures:
    """What is used of the cards of a cluster. A sum leaves out what is not measured; it is not measured if nothing is.

    Attributes:
        total: the sum over all cards.
        nodes, models, pods: the sums by node, by model, and by pod.
    """

    total: Used
    nodes: Mapping[str, Used]
    models: Mapping[str, Used]
    pods: Mapping[str, Used]

    def of_node(self, name: str) -> Used:
        return self.nodes.get(name, NOT_MEASURED)

    def of_model(self, name: str) -> Used:
        return self.models.get(name, NOT_MEASURED)

    def of_pod(self, name: str) -> Used:
        return self.pods.get(name, NOT_MEASURED)


def use_figures(nodes: Iterable[NodeView], use: Mapping[str, MeasuredUse]) -> UseFigures:
    total = NOT_MEASURED
    by_node: dict[str, Used] = {}
    models: dict[str, Used] = {}
    pods: dict[str, Used] = {}
    for node in nodes:
        found = use.get(node.name)
        if not isinstance(found, NodeUse):
            continue
        cards = use_of_cards(node, found)
        for view in node.cards:
            used = cards.of_card(view.state.card.index)
            model = view.state.card.model or UNKNOWN_MODEL
            total = add(total, used)
            by_node[node.name] = add(by_node.get(node.name, NOT_MEASURED), used)
            models[model] = add(models.get(model, NOT_MEASURED), used)
        for (_, pod), used in cards.pods.items():
            pods[pod] = add(pods.get(pod, NOT_MEASURED), used)
    return UseFigures(total, by_node, models, pods)


def used_json(used: Used) -> Json:
    """Return `{"core", "memory"}`, in percent of a card and in bytes; null for what is not measured."""
    return {"core": None if used.core is None else percent(used.core), "memory": used.memory}


def node_use_json(node: NodeView, use: MeasuredUse) -> Json:
    """Return what is used of a node's cards: `{"unknown", "problem", "cards", "containers"}`.

    `unknown` is the reason why no use is known, and `problem` why that of containers is not known, or null. Each card
    has its `pods`, with what each of them holds of it and uses of it.
    """
    if isinstance(use, UnknownUse):
        return {"unknown": use.reason, "problem": None, "cards": [], "containers": []}
    found = use_of_cards(node, use)
    return {
        "unknown": None,
        "problem": use.problem,
        "cards": [_card_json(view, found) for view in node.cards],
        "containers": [
            {
                "pod": row.pod,
                "container": row.container,
                "index": row.index,
                "uuid": row.uuid,
                "used": used_json(row.used),
                "memoryLimit": row.limit,
            }
            for row in use.containers
        ],
    }


def _card_json(view: CardView, found: UseOfCards) -> Json:
    index = view.state.card.index
    return {
        "index": index,
        "uuid": view.state.card.uuid,
        "used": used_json(found.of_card(index)),
        "pods": [
            {
                "pod": use.pod,
                "held": {"core": percent(use.core), "memory": use.memory},
                "used": used_json(found.of_pod(index, use.pod)),
            }
            for use in view.uses
        ],
    }
