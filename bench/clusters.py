"""Synthetic clusters of nodes with 8 cards, and the pods on them. They are the same in every run.

`bench.made`, `bench.apistub`, `bench.filter`, `bench.page` and `bench.startup` use them.
"""

import random
from typing import Any

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from scheduler.cluster.cache import ClusterCache
from tests import builders as b

CARDS = PODS = 8


def fill_but(state: ClusterCache, nodes: int, spare: int) -> None:
    """Add nodes on which each card is held whole by a pod, except for the first `spare` cards of the cluster."""
    for i in range(nodes):
        name = f"node-{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
        for card in range(CARDS):
            if i * CARDS + card >= spare:
                state.pod_changed(held(f"{i}-{card}", i, card, b.container("c", 100)))


def held(name: str, node: int, card: int, container: dict[str, Any]) -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(card)}
    raw = b.pod(name, container, annotations=record, node=f"node-{node}", phase="Running")
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}}


def fill(state: ClusterCache, nodes: int) -> None:
    """Add nodes with 8 pods each. On every second node no card has 80 % of its core free."""
    pick = random.Random(0)
    for i in range(nodes):
        name = f"node-{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
        for j in range(PODS):
            state.pod_changed(running(f"{i}-{j}", i, pick.randrange(1 << 30)))


def running(name: str, node: int, seed: int) -> dict[str, Any]:
    """Return a running pod with a share of one card, which is larger on a node with an odd number.

    Args:
        name: The name of the pod. Its last character must be a digit, which determines the card.
        node: The number of the node.
    """
    pick = random.Random(seed)
    full = node % 2
    core = 30 + pick.randrange(40) if full else 10 + pick.randrange(20)
    card = int(name[-1]) % CARDS
    mib = 1024 + pick.randrange(15 * 1024)
    return held(name, node, card, b.container("c", core, mib))
