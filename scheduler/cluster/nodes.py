"""Stores the nodes of the API server, their cards, and the shares that the nodes themselves gave to pods.

The cards of a node come from its Device. If a node has neither a Device nor mgpu's agent, its capacity may say how many
equal cards it has. A ConfigMap can mark cards as unhealthy. Annotations of the Node say how its cards are partitioned
(scheduler/cluster/slice_state.py). An invalid Device or annotation must never take cards away: what was read last stays
in force, and a warning is published. The cluster cache uses `Nodes` with its lock held.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mgpu import dialects
from mgpu.kube.events import node_reference
from mgpu.model import device_object, node_slices
from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import read_entries, shares_by_pod
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.pods import Node
from mgpu.settings import Settings
from mgpu.version import AGENT_ANNOTATION
from scheduler.cluster.events import ObjectWarning, Publisher
from scheduler.cluster.slice_state import SliceStates

Raw = Mapping[str, Any]
GivenShares = Mapping[str, tuple[Share, ...]]
"""By pod UID, the shares that the node itself gave to the pod, for example through NVIDIA's device plugin."""

_MAX_MESSAGE = 1024
"""The maximum length of a warning, in characters. A warning about an invalid object may quote the object."""


class Nodes:
    """Part of the ClusterCache, which holds its lock around every call.

    A method that takes a Device or a ConfigMap returns the name of the node whose cards or given shares it may have
    changed, or None.
    """

    def __init__(self, settings: Settings, events: Publisher) -> None:
        self._settings = settings
        self._events = events
        self._nodes: dict[str, Node] = {}
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._given: dict[str, GivenShares] = {}
        self._unhealthy: dict[str, frozenset[int]] = {}
        self._problems: dict[str, str] = {}
        self.slices = SliceStates(events)

    def get(self, name: str) -> Node | None:
        """Return the node, or None if there is none with this name."""
        return self._nodes.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def node_changed(self, node: Node) -> None:
        self._nodes[node.name] = node
        self.slices.node_changed(node)

    def node_gone(self, name: str) -> None:
        self._nodes.pop(name, None)
        self.slices.node_gone(name)
        self._forget_given(name)

    def device_changed(self, raw: Raw) -> str | None:
        """Store a Device. If a part of it cannot be read, the part that was read last stays in force."""
        name = raw["metadata"]["name"]
        cards = self._cards.get(name)
        given = self._given.get(name, {})
        self._problems.pop(f"Device {name}", None)
        try:
            given = shares_by_pod(read_entries(raw))
        except BadObject as error:
            self._problems[f"Device {name}"] = str(error)[:_MAX_MESSAGE]
            self._warn(name, "BadCheckpoints", f"Ignoring the invalid list of devices given out on {name}: {error}")
        try:
            cards = device_object.read_device(raw)
        except BadObject as error:
            self._problems[f"Device {name}"] = str(error)[:_MAX_MESSAGE]
            self._warn(name, "BadDevice", f"Ignoring invalid Device {name}: {error}")
        if (cards, given) == (self._cards.get(name), self._given.get(name, {})):
            return None
        self._given[name] = given
        if cards is not None:
            self._cards[name] = cards
        return str(name)

    def device_gone(self, raw: Raw) -> str | None:
        """Remove the cards of a Device that was deleted. The holdings on these cards stay."""
        name = str(raw["metadata"]["name"])
        self._problems.pop(f"Device {name}", None)
        had_cards = self._cards.pop(name, None) is not None
        if name not in self._nodes:
            self._forget_given(name)
        return name if had_cards else None

    def _forget_given(self, name: str) -> None:
        """Forget what a node gave to pods, if both its Node and its Device were deleted."""
        if name not in self._nodes and name not in self._cards:
            self._given.pop(name, None)

    def configmap_changed(self, raw: Raw) -> str | None:
        """Store the unhealthy cards that a ConfigMap of gpushare lists. An unreadable list counts as empty."""
        unhealthy_list = dialects.unhealthy_list_of(raw)
        if unhealthy_list is None:
            return None
        node, lists = unhealthy_list
        name = raw["metadata"]["name"]
        self._problems.pop(f"ConfigMap {name}", None)
        try:
            return self._set_unhealthy(node, lists.cards_of(raw))
        except BadObject as error:
            self._problems[f"ConfigMap {name}"] = str(error)[:_MAX_MESSAGE]
            self._warn(node, "BadUnhealthyList", f"ConfigMap {name} marks no card: {error}")
            return self._set_unhealthy(node, frozenset())

    def configmap_gone(self, raw: Raw) -> str | None:
        """Remove the list of a ConfigMap that was deleted."""
        self._problems.pop(f"ConfigMap {raw['metadata']['name']}", None)
        unhealthy_list = dialects.unhealthy_list_of(raw)
        return None if unhealthy_list is None else self._set_unhealthy(unhealthy_list[0], frozenset())

    def _set_unhealthy(self, node: str, unhealthy: frozenset[int]) -> str | None:
        if self._unhealthy.get(node, frozenset()) == unhealthy:
            return None
        self._unhealthy[node] = unhealthy
        return node

    def _warn(self, node: str, reason: str, message: str) -> None:
        self._events.publish(ObjectWarning(node_reference(node), reason, message[:_MAX_MESSAGE]))

    def cards(self, node: Node) -> tuple[Card, ...]:
        """Return the devices that pods can get: GPUs that are not partitioned, slices, and devices of other types."""
        devices = self._devices(node)
        slices = self.slices.of(node.name)
        if not slices.mode:
            return devices
        others = tuple(card for card in devices if card.type != GPU)
        if self.slices.is_unreadable(node.name):
            return others  # Any GPU may be partitioned, into unknown slices.
        gpus = _gpus(devices)
        return (*node_slices.unpartitioned_cards(slices, gpus), *node_slices.slice_devices(slices, gpus), *others)

    def gpus(self, node: Node) -> tuple[Card, ...]:
        """Return all GPUs of a node, partitioned or not."""
        return _gpus(self._devices(node))

    def _devices(self, node: Node) -> tuple[Card, ...]:
        """Return the physical devices of the node. A GPU that a ConfigMap of gpushare lists is unhealthy."""
        cards = self._cards.get(node.name)
        if cards is None:
            # If mgpu's agent runs here, it is about to create the Device. Allocation records must not name cards that
            # are only inferred from the capacity, because the Device may list others.
            cards = () if AGENT_ANNOTATION in node.annotations else dialects.cards_from_capacity(node, self._settings)
        listed = self._unhealthy.get(node.name)
        if not listed:
            return cards
        return tuple(replace(c, healthy=False) if c.type == GPU and c.index in listed else c for c in cards)

    def problems(self) -> dict[str, str]:
        """Return why Devices and ConfigMaps of gpushare cannot be read, by kind and name (`Device n1`)."""
        return dict(self._problems)

    def given(self, node: str) -> GivenShares:
        """Return the shares of cards and slices that the node itself gave to pods."""
        given = self._given.get(node, {})
        sliced = self.slices.held(node)
        return {uid: (*given.get(uid, ()), *sliced.get(uid, ())) for uid in {**given, **sliced}} if sliced else given


def _gpus(devices: Iterable[Card]) -> tuple[Card, ...]:
    return tuple(card for card in devices if card.type == GPU)
