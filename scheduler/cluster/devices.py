"""What nodes and their Devices say of cards: which there are, which are healthy, how they are cut, and which the node
itself gave out.
"""

from collections.abc import Callable, Iterable, Mapping
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
from scheduler.cluster.slice_state import KnownSlices

Raw = Mapping[str, Any]
Given = Mapping[str, tuple[Share, ...]]

_MOST_MESSAGE = 1024
"""Characters of a message about an invalid object, which may quote what is wrong with it a thousand times."""


class Inventories:
    """Not thread-safe. The methods that take an object return the name of the node of which it changes something."""

    def __init__(self, settings: Settings, warn: Callable[[dict[str, Any], str, str], None]) -> None:
        self._settings, self._warn = settings, warn
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._given: dict[str, Given] = {}
        self._unhealthy: dict[str, frozenset[int]] = {}
        self.slices = KnownSlices(warn)

    def device_changed(self, raw: Raw) -> str | None:
        """A Device that cannot be read leaves the last good inventory in force, and so does each part of it."""
        name = raw["metadata"]["name"]
        cards, given = self._cards.get(name), self._given.get(name, {})
        try:
            cards = device_object.read_device(raw)
        except BadObject as error:
            self._warn(node_reference(name), "BadDevice", f"Ignoring invalid Device {name}: {error}"[:_MOST_MESSAGE])
        try:
            given = shares_by_pod(read_entries(raw))
        except BadObject as error:
            message = f"Ignoring the invalid list of what was given out on {name}: {error}"
            self._warn(node_reference(name), "BadCheckpoints", message[:_MOST_MESSAGE])
        if (cards, given) == (self._cards.get(name), self._given.get(name, {})):
            return None
        self._given[name] = given
        if cards is not None:
            self._cards[name] = cards
        return str(name)

    def device_gone(self, raw: Raw) -> str | None:
        """Its cards are no longer given; what is held on them stays held."""
        name = str(raw["metadata"]["name"])
        return name if self._cards.pop(name, None) is not None else None

    def node_gone(self, name: str) -> None:
        """What it gave out is forgotten once its Device is gone too: no node of this name may ever come again."""
        self.slices.node_gone(name)
        if name not in self._cards:
            self._given.pop(name, None)

    def configmap_changed(self, raw: Raw) -> str | None:
        """Mark the cards that a ConfigMap lists as unhealthy; an unreadable list marks none."""
        found = dialects.unhealthy_list_of(raw)
        if found is None:
            return None
        node, lists = found
        try:
            return self._mark(node, lists.cards_of(raw))
        except BadObject as error:
            name = raw["metadata"]["name"]
            self._warn(node_reference(node), "BadUnhealthyList", f"ConfigMap {name} marks no card: {error}")
            return self._mark(node, frozenset())

    def configmap_gone(self, raw: Raw) -> str | None:
        found = dialects.unhealthy_list_of(raw)
        return None if found is None else self._mark(found[0], frozenset())

    def _mark(self, node: str, unhealthy: frozenset[int]) -> str | None:
        if self._unhealthy.get(node, frozenset()) == unhealthy:
            return None
        self._unhealthy[node] = unhealthy
        return node

    def cards(self, node: Node) -> tuple[Card, ...]:
        """What pods can be given: the cards that are not cut, the slices of the others, and devices of other types."""
        devices = self._devices(node)
        found = self.slices.of(node.name)
        if not found.mode:
            return devices
        gpus, others = _gpus(devices), tuple(c for c in devices if c.type != GPU)
        if self.slices.untold(node.name):
            return others  # any card may be cut, into what nobody knows
        return (*node_slices.undivided(found, gpus), *node_slices.devices(found, gpus), *others)

    def gpus(self, node: Node) -> tuple[Card, ...]:
        """All of them, cut or not."""
        return _gpus(self._devices(node))

    def _devices(self, node: Node) -> tuple[Card, ...]:
        """As the node has them, unhealthy where anybody says so.

        Where mgpu's agent is, the Device is on its way, and a record of cards that were made up would never hold.
        """
        cards = self._cards.get(node.name)
        if cards is None:
            cards = () if AGENT in node.annotations else dialects.cards_from_capacity(node, self._settings)
        listed = self._unhealthy.get(node.name)
        if not listed:
            return cards
        return tuple(replace(c, healthy=False) if c.type == GPU and c.index in listed else c for c in cards)

    def given(self, node: str) -> Given:
        """By UID, the shares of the pods to which the node itself gave cards, or slices of them."""
        given = self._given.get(node, {})
        sliced = self.slices.held(node)
        return {uid: (*given.get(uid, ()), *sliced.get(uid, ())) for uid in {**given, **sliced}} if sliced else given


def _gpus(devices: Iterable[Card]) -> tuple[Card, ...]:
    return tuple(card for card in devices if card.type == GPU)
