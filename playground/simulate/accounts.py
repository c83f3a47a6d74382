"""The simulated cluster as it fills: who holds what, and what was learnt from the pods so far."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mgpu.cli.mtgpupods import occupying
from mgpu.cli.views import Sliced
from mgpu.model.asks import Ask, Placement
from mgpu.model.cards import CardState
from mgpu.model.groups import Seat
from mgpu.model.ledger import Holding, Ledger, shares_of
from mgpu.model.pods import Pod, read_node
from mgpu.model.requests import Requests, add, requests_of
from mgpu.model.slices import Slice
from mgpu.settings import Settings
from playground.simulate.cutting import Cutting
from playground.simulate.documents import Raw
from playground.simulate.world import World
from scheduler import stock
from scheduler.outlook import Outlook
from scheduler.slices.named import NamedUsage
from scheduler.slices.score import named_resources
from scheduler.slices.site import Site, site_of
from scheduler.usage import Usage
from scheduler.views import View


class Accounts:
    """`scheduler.state.State` without watches: what a ranking of nodes asks it (scheduler.ranking.Cluster).

    used: per node the sum of all that its pods request.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self.raw = {name: world.nodes[name] for name in sorted(world.nodes)}
        self.nodes = {name: read_node(raw) for name, raw in self.raw.items()}
        self.used: dict[str, Requests] = {name: {} for name in self.raw}
        self.ledger = Ledger()
        self.outlook = Outlook(settings)
        self._moved = set(self.raw)
        self._usage = Usage(self._moved.add)
        self._geometries = settings.dialects.slices.geometries
        self._named = NamedUsage(named_resources(settings.dialects.slices))
        self.cuttings = {name: Cutting(node, world.cards[name]) for name, node in self.nodes.items()}
        for name, node in self.nodes.items():
            self.ledger.set_cards(name, self.cuttings[name].inventory())
            self.outlook.set_node(name, node, self.ledger.cards(name))

    def reserve(self, pod: Pod, raw: Raw, node: str) -> None:
        """The pod is on this node, whatever it holds of its cards."""
        self.used[node] = add(self.used[node], requests_of(raw))
        self._usage.put(pod.uid, node, pod.needs)
        self._named.follow(replace(pod, node=node))

    def hold(self, holding: Holding) -> None:
        self.ledger.hold(holding)
        self._moved.add(holding.node)

    def release(self, uid: str) -> None:
        held = self.ledger.release(uid)
        if held:
            self._moved.add(held.node)

    def place(self, pod: Pod, ask: Ask, placement: Placement, node: str) -> None:
        dialect = stock.NVIDIA if stock.chooses(self.nodes[node], ask) else ask.dialect
        shares = shares_of(ask, placement)
        holding = Holding(pod.uid, pod.namespace, pod.name, node, dialect, shares, wishes=ask.wishes)
        self.hold(occupying(holding, pod))

    def devices(self, node: str, without: str = "", gpuid: str = "") -> tuple[CardState, ...]:
        """Of all types; gpuid: as the occupy pod of this one finds them."""
        return (*self.cards(node, without, gpuid), *self.ledger.others(node, without))

    def cards(self, node: str, without: str = "", gpuid: str = "") -> tuple[CardState, ...]:
        if gpuid:
            return self.ledger.for_gpuid(node, gpuid, without)
        return self.ledger.cards(node, without)

    def moved(self) -> Iterable[tuple[str, View]]:
        """The nodes that have changed since the last call."""
        moved = [(name, self.view(name, "")) for name in sorted(self._moved)]
        self._moved.clear()
        return moved

    def view(self, node: str, without: str) -> View:
        known = self.nodes[node]
        cards, others = self.ledger.cards(node, without), self.ledger.others(node, without)
        room = known.room.less(self._usage.on(node, without))
        return View(known, cards, 0, room, unkept=cards, others=others, unkept_others=others)

    def site(self, node: str, without: str) -> Site | None:
        """None: its cards are not given out in slices."""
        cutting = self.cuttings[node]
        if not cutting.sliced:
            return None
        return site_of(
            self.nodes[node],
            cutting.found,
            cutting.gpus,
            self.devices(node, without),
            [held for held in self.ledger.holdings(node) if held.uid != without],
            self._geometries,
            room=self.view(node, without).room,
            named=self._named.on(node),
            problem=cutting.problem,
        )

    def cut(self, node: str, slices: Iterable[Slice]) -> None:
        """All that the node's cards are cut into from now on."""
        self.cuttings[node].cut(slices)
        self.ledger.set_cards(node, self.cuttings[node].inventory())
        self._moved.add(node)

    def sliced(self) -> Mapping[str, Sliced]:
        return {name: cut.view(self.ledger.holdings(name)) for name, cut in self.cuttings.items() if cut.sliced}

    def decision(self, uid: str) -> None:  # noqa: ARG002
        """Nothing is reserved: each pod is bound before the next one comes."""
        return

    def seats(self, ask: Ask, without: str) -> tuple[Seat, ...]:
        return self.ledger.seats(ask.wishes.same_card, without)

    def group_nodes(self, ask: Ask) -> frozenset[str]:
        return frozenset(held.node for group in ask.wishes.groups for held in self.ledger.members(group))
