"""What the API server says about nodes: Node objects, the cards of their Devices, and what each node gave out itself.

Three sources add up to the cards of a node. Its Device object lists them; of a node without a Device, its capacity may
say how many equal cards it has; and a ConfigMap can mark cards unhealthy.
How cards are partitioned stands in annotations of the Node (scheduler/cluster/slice_state.py).
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
from mgpu.version import AGENT
from scheduler.cluster.events import ObjectWarning, Publisher
from scheduler.cluster.slice_state import KnownSlices

Raw = Mapping[str, Any]
Given = Mapping[str, tuple[Share, ...]]
"""By the UID of a pod, the shares that its node itself gave it: by NVIDIA's plugin, or before mgpu had a record."""

_MESSAGE_CHARACTERS = 1024
"""A message about an invalid object may quote what is wrong with it a thousand times."""


class Nodes:
    """Part of the ClusterCache, which holds its lock around every call.

    A method that takes an object of the API returns the name of the node whose cards it may have changed, or None.
    """

    def __init__(self, settings: Settings, events: Publisher) -> None:
        self._settings = settings
        self._events = events
        self._nodes: dict[str, Node] = {}
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._given: dict[str, Given] = {}
        self._unhealthy: dict[str, frozenset[int]] = {}
        self.slices = KnownSlices(events)

    def get(self, name: str) -> Node | None:
        """Return the Node, or None where there is none of this name."""
        return self._nodes.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def node_changed(self, node: Node) -> None:
        """Take in a Node that was added or modified."""
        self._nodes[node.name] = node
        self.slices.node_changed(node)

    def node_gone(self, name: str) -> None:
        """Take in that a Node was deleted."""
        self._nodes.pop(name, None)
        self.slices.node_gone(name)
        self._forget_given(name)

    def device_changed(self, raw: Raw) -> str | None:
        """Take in a Device. Each part of it that cannot be read leaves the last good one in force."""
        name = raw["metadata"]["name"]
        cards = self._cards.get(name)
        given = self._given.get(name, {})
        try:
            cards = device_object.read_device(raw)
        except BadObject as error:
            self._warn(name, "BadDevice", f"Ignoring invalid Device {name}: {error}")
        try:
            given = shares_by_pod(read_entries(raw))
        except BadObject as error:
            self._warn(name, "BadCheckpoints", f"Ignoring the invalid list of what was given out on {name}: {error}")
        if (cards, given) == (self._cards.get(name), self._given.get(name, {})):
            return None
        self._given[name] = given
        if cards is not None:
            self._cards[name] = cards
        return str(name)

    def device_gone(self, raw: Raw) -> str | None:
        """Take in that a Device was deleted: its cards are no longer offered, what is held on them stays held."""
        name = str(raw["metadata"]["name"])
        had_cards = self._cards.pop(name, None) is not None
        if name not in self._nodes:
            self._forget_given(name)
        return name if had_cards else None

    def _forget_given(self, name: str) -> None:
        """Forget what a node gave out once both its Node and its Device are gone: it may never come back."""
        if name not in self._nodes and name not in self._cards:
            self._given.pop(name, None)

    def configmap_changed(self, raw: Raw) -> str | None:
        """Take in a ConfigMap that may list unhealthy cards. An unreadable list marks none."""
        found = dialects.unhealthy_list_of(raw)
        if found is None:
            return None
        node, lists = found
        try:
            return self._mark(node, lists.cards_of(raw))
        except BadObject as error:
            name = raw["metadata"]["name"]
            self._warn(node, "BadUnhealthyList", f"ConfigMap {name} marks no card: {error}")
            return self._mark(node, frozenset())

    def configmap_gone(self, raw: Raw) -> str | None:
        """Take in that a ConfigMap was deleted."""
        found = dialects.unhealthy_list_of(raw)
        return None if found is None else self._mark(found[0], frozenset())

    def _mark(self, node: str, unhealthy: frozenset[int]) -> str | None:
        if self._unhealthy.get(node, frozenset()) == unhealthy:
            return None
        self._unhealthy[node] = unhealthy
        return node

    def _warn(self, node: str, reason: str, message: str) -> None:
        self._events.publish(ObjectWarning(node_reference(node), reason, message[:_MESSAGE_CHARACTERS]))

    def cards(self, node: Node) -> tuple[Card, ...]:
        """Return what pods can be given: unpartitioned cards, the slices of the others, and devices of other types."""
        devices = self._devices(node)
        found = self.slices.of(node.name)
        if not found.mode:
            return devices
        others = tuple(card for card in devices if card.type != GPU)
        if self.slices.is_unreadable(node.name):
            return others  # any GPU may be partitioned, into slices that are not known
        gpus = _gpus(devices)
        return (*node_slices.undivided(found, gpus), *node_slices.devices(found, gpus), *others)

    def gpus(self, node: Node) -> tuple[Card, ...]:
        """Return all GPUs of a node, partitioned or not."""
        return _gpus(self._devices(node))

    def _devices(self, node: Node) -> tuple[Card, ...]:
        """Return the devices as the node has them, unhealthy where its Device or a ConfigMap says so."""
        cards = self._cards.get(node.name)
        if cards is None:
            # Where mgpu's agent runs, the Device is on its way. Cards that are made up from totals meanwhile would end
            # up in records that no later Device confirms.
            cards = () if AGENT in node.annotations else dialects.cards_from_capacity(node, self._settings)
        listed = self._unhealthy.get(node.name)
        if not listed:
            return cards
        return tuple(replace(c, healthy=False) if c.type == GPU and c.index in listed else c for c in cards)

    def given(self, node: str) -> Given:
        """Return the shares, cards or slices of them, that the node itself gave to pods."""
        given = self._given.get(node, {})
        sliced = self.slices.held(node)
        return {uid: (*given.get(uid, ()), *sliced.get(uid, ())) for uid in {**given, **sliced}} if sliced else given


def _gpus(devices: Iterable[Card]) -> tuple[Card, ...]:
    return tuple(card for card in devices if card.type == GPU)
