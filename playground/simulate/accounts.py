"""The simulated cluster as it fills: holdings, usage and partitioned cards of every node."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.groups import Seat
from mgpu.model.ledger import Holding, Ledger, shares_of
from mgpu.model.node_requests import Requests, add, requests_of
from mgpu.model.pods import Pod, read_node
from mgpu.model.slices import Slice
from mgpu.presentation.card_views import Sliced
from mgpu.presentation.mtgpupod_tables import occupying
from mgpu.settings import Settings
from playground.simulate.cutting import Cutting
from playground.simulate.world import Raw, World
from scheduler.cluster.forecast import Outlook
from scheduler.cluster.node_usage import Usage
from scheduler.cluster.node_view import View
from scheduler.engine import nvidia_plugin
from scheduler.engine.effort import full_budget
from scheduler.engine.partitioning.named_resources import NamedUsage
from scheduler.engine.partitioning.partitionable_node import Site, cut, site_of, wanted_by
from scheduler.engine.partitioning.slice_choice import answer_of, best_first
from scheduler.engine.partitioning.slice_score import named_resources, site_score


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

    def place(self, pod: Pod, request: GpuRequest, placement: Placement, node: str) -> None:
        dialect = nvidia_plugin.NVIDIA if nvidia_plugin.chooses(self.nodes[node], request) else request.dialect
        shares = shares_of(request, placement)
        holding = Holding(pod.uid, pod.namespace, pod.name, node, dialect, shares, constraints=request.constraints)
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

    def seats(self, request: GpuRequest, without: str) -> tuple[Seat, ...]:
        return self.ledger.seats(request.constraints.same_card, without)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        return frozenset(held.node for group in request.constraints.groups for held in self.ledger.members(group))


_ANEW = "its cards would have to be cut anew"


class Recutting:
    """Asks for cards are none of its business: nothing is said of them."""

    def __init__(self, accounts: Accounts, settings: Settings) -> None:
        self._accounts, self._settings = accounts, settings.dialects.slices

    def restore(self) -> None:
        """Slices that records name and that are not there are made again, as after a reboot."""
        for name in self._accounts.cuttings:
            site = self._accounts.site(name, "")
            slices = cut(site, []) if site and site.missing and not site.problem else None
            if slices is not None and not isinstance(slices, Rejection):
                self._accounts.cut(name, slices)

    def refusal(self, pod: Pod, request: GpuRequest, node: str) -> Rejection | None:
        """Why a node, cut as it is, does not have the slices; None: it has."""
        wanted, site = wanted_by(request), self._accounts.site(node, pod.uid)
        if not wanted or site is None:
            return None
        answer = answer_of(site, wanted, full_budget())
        if not answer.reason:
            return None
        return Rejection(_ANEW if answer.recut else answer.reason, hopeless=answer.hopeless, proven=answer.proven)

    def recut(self, pod: Pod, request: GpuRequest, nodes: Iterable[str]) -> str:
        """The node that has been cut for it, the best one of these; "": none can be."""
        wanted = wanted_by(request)
        known = [self._accounts.site(name, pod.uid) for name in nodes] if wanted else []
        able = [site for site in known if site and not site.problem and request.unmet(site.node) is None]
        for site in best_first(able, wanted, pod, self._settings):
            slices = cut(site, [wanted])
            if not isinstance(slices, Rejection):
                self._accounts.cut(site.node.name, slices)
                return site.node.name
        return ""

    def score(self, pod: Pod, request: GpuRequest, node: str) -> int | None:
        """0..10; None: the pod asks for no slices."""
        wanted, site = wanted_by(request), self._accounts.site(node, pod.uid)
        return site_score(site, wanted, pod, self._settings) if wanted and site else None
