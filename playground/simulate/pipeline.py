"""mutate → validate → filter → score → bind → allocate, pod after pod, by the functions of the three processes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonpatch

from mgpu import dialects
from mgpu.cli.overview import NO_RECORD, STOCK, ask_of, claim, missing
from mgpu.cli.views import NodeView, nodes_json, views
from mgpu.dialects.node_resources import SHARE
from mgpu.dialects.vocabulary import vocabularies, vocabulary_of
from mgpu.model.asks import Ask, Placement, Rejection
from mgpu.model.errors import Problem
from mgpu.model.ledger import Holding, Share
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import QuantityError
from mgpu.model.requests import allocatable, requests_of
from mgpu.settings import Settings
from playground import fit
from playground.simulate.accounts import Accounts
from playground.simulate.delivery import Delivery
from playground.simulate.documents import Raw
from playground.simulate.recutting import Recutting
from playground.simulate.world import World
from scheduler import stock
from scheduler.decide import Foresight, assess, record, score
from scheduler.gpu_pods import GpuPod
from scheduler.ranking import Ranking
from webhook.mutate import mutate
from webhook.validate import strange_wishes, validate_create

_OF_THE_NODE = ("cpu", "memory", "ephemeral-storage", "pods")


@dataclass(slots=True)
class Outcome:
    """What became of one submitted pod. node "": denied, or it waits."""

    pod: Pod
    dialect: str | None = None
    denied: list[Problem] = field(default_factory=list)
    patch: list[Raw] = field(default_factory=list)
    node: str = ""
    rejections: dict[str, str] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        return not self.denied and not self.node


@dataclass(frozen=True, slots=True)
class Result:
    """outcomes: of the submitted pods, in file order."""

    outcomes: Sequence[Outcome]
    nodes: Sequence[NodeView]


def simulate(world: World, settings: Settings, note: Callable[[str], None]) -> Result:
    """note: told, in a line each, what is odd about pods that run already."""
    cluster = _Cluster(world, settings, note)
    for name, cutting in cluster.accounts.cuttings.items():
        if cutting.problem:
            note(f"node {name}: what it says of its slices is not taken: {cutting.problem}")
    cluster.take_in(world.running, world.given)
    outcomes = [cluster.submit(raw) for raw in world.submitted]
    return Result(outcomes, views(cluster.accounts.ledger, cluster.accounts.sliced()))


class _Cluster:
    def __init__(self, world: World, settings: Settings, note: Callable[[str], None]) -> None:
        self._settings, self._note = settings, note
        self.accounts = Accounts(world, settings)
        self._ranking = Ranking(self.accounts, settings)
        self._recutting = Recutting(self.accounts, settings)

    def take_in(self, running: Iterable[Raw], given: Mapping[str, Mapping[str, tuple[Share, ...]]]) -> None:
        """Records first: cards that somebody holds must be known before any are decided late."""
        given = {name: {**given.get(name, {}), **cut.given()} for name, cut in self.accounts.cuttings.items()}
        unknown = {uid: Holding(uid, "", "", node, STOCK, rows[uid]) for node, rows in given.items() for uid in rows}
        undecided: list[tuple[Pod, Ask]] = []
        for raw in running:
            pod = read_pod(raw)
            ask = ask_of(pod, self._settings)
            unknown.pop(pod.uid, None)
            if isinstance(ask, Ask):
                self.accounts.outlook.saw(pod, ask)
            if pod.ended:
                continue
            self.accounts.reserve(pod, raw, pod.node)
            found = claim(pod, ask, given.get(pod.node, {}).get(pod.uid, ()))
            if found.holding:
                self.accounts.hold(found.holding)
            if found.problem == NO_RECORD and isinstance(ask, Ask):
                undecided.append((pod, ask))
            elif found.problem:
                self._note(f"pod {pod.key}: {found.problem}")
        for holding in unknown.values():
            self.accounts.hold(holding)
        self._recutting.restore()
        for holding in self.accounts.ledger.holdings():
            odd = missing(holding, (state.card for state in self.accounts.devices(holding.node)))
            if odd:
                self._note(f"pod {holding.key}: {odd}")
        self._learn()
        for pod, ask in undecided:
            self._decide_late(pod, ask)

    def _decide_late(self, pod: Pod, ask: Ask) -> None:
        placement = self._assess(pod, ask, pod.node)
        if isinstance(placement, Rejection) and self._recutting.recut(pod, ask, [pod.node]):
            placement = self._assess(pod, ask, pod.node)
        if isinstance(placement, Placement):
            self.accounts.place(pod, ask, placement, pod.node)
        else:
            self._note(f"pod {pod.key}: no cards on {pod.node}: {placement}")

    def _learn(self) -> None:
        if self.accounts.outlook.refresh():
            self._ranking.refresh()

    def submit(self, raw: Raw) -> Outcome:
        outcome = Outcome(read_pod(raw))
        raw = self._admit(outcome, raw)
        if outcome.denied:
            return outcome
        ask = dialects.read_ask(outcome.pod, self._settings)
        if ask is not None:
            self.accounts.outlook.saw(outcome.pod, ask)
            self._learn()
        placements = self._filter(outcome, raw, ask)
        if placements:
            node = min(placements, key=lambda name: (-outcome.scores.get(name, 0), name))
            self._bind(outcome, raw, ask, placements[node], node)
        return outcome

    def _admit(self, outcome: Outcome, raw: Raw) -> Raw:
        outcome.dialect = next(iter(vocabularies(outcome.pod)), None)
        outcome.patch = [dict(operation) for operation in mutate(raw, self._settings).patch]
        raw = jsonpatch.apply_patch(raw, outcome.patch)
        outcome.denied = validate_create(raw, self._settings) or _unreadable(raw)
        for warning in strange_wishes(raw, None):
            self._note(f"pod {outcome.pod.key}: {warning}")
        outcome.pod = read_pod(raw)
        return raw

    def _filter(self, outcome: Outcome, raw: Raw, ask: Ask | None) -> dict[str, Placement | None]:
        """The nodes that can take the pod, each with its cards (None: it asks for none); the others are told why.

        Where it fits on none, but one could be cut so that it does, that one is.
        """
        placements: dict[str, Placement | None] = {}
        tried: list[str] = []
        for name, node in self.accounts.raw.items():
            reasons = fit.fits(raw, node, self.accounts.used[name], _counted(node))
            if reasons:
                outcome.rejections[name] = ", ".join(reasons)
            elif ask is None and outcome.dialect:
                outcome.rejections[name] = f"no node serves {outcome.dialect} pods"
            elif ask is None:
                placements[name] = None
            else:
                tried.append(name)
                self._try(outcome, ask, name, placements)
        if ask is not None and not placements:
            anew = self._recutting.recut(outcome.pod, ask, tried)
            if anew:
                self._try(outcome, ask, anew, placements)
        points = self._ranking.points(GpuPod(outcome.pod, ask), list(placements))
        if points is not None:
            outcome.scores = dict(zip(placements, points, strict=True))
        return placements

    def _try(self, outcome: Outcome, ask: Ask, name: str, placements: dict[str, Placement | None]) -> None:
        outcome.rejections.pop(name, None)
        found = self._assess(outcome.pod, ask, name)
        if isinstance(found, Rejection):
            outcome.rejections[name] = str(found)
            return
        placements[name] = found
        points = self._recutting.score(outcome.pod, ask, name)
        if points is None:
            points = score(ask, found, self.accounts.devices(name), self._settings)
        outcome.scores[name] = points

    def _assess(self, pod: Pod, ask: Ask, node: str) -> Placement | Rejection:
        view, seats = self.accounts.view(node, pod.uid), self.accounts.seats(ask, pod.uid)
        known, devices = self.accounts.nodes[node], self.accounts.devices(node, pod.uid)
        if stock.chooses(known, ask):
            refused = stock.refusal(ask, known, view.cards, stock.given_by_mgpu(self.accounts.ledger, node, pod.uid))
            return refused or assess(ask, known, devices, self._settings)  # one of the choices that the plugin has
        refusal = ask.unmet(known) is None and self._recutting.refusal(pod, ask, node)
        if refusal:
            return refusal
        foresight = Foresight(self.accounts.outlook.judges, view.room, pod.needs)
        return assess(ask, known, devices, self._settings, foresight, seats=seats)

    def _bind(self, outcome: Outcome, raw: Raw, ask: Ask | None, placement: Placement | None, node: str) -> None:
        outcome.node = node
        self.accounts.reserve(outcome.pod, raw, node)
        if ask is None or placement is None:
            return
        devices = self.accounts.devices(node)
        if not stock.chooses(self.accounts.nodes[node], ask):
            outcome.annotations = record(outcome.pod, ask, placement, devices, self._settings, now_ns=0)
        self.accounts.place(outcome.pod, ask, placement, node)
        cards, gpus = [state.card for state in devices], self.accounts.cuttings[node].gpus
        outcome.containers = Delivery(outcome.pod, ask, placement, cards, gpus, self._settings).containers()


def _unreadable(raw: Raw) -> list[Problem]:
    """An amount that the API server refuses in whatever resource."""
    try:
        requests_of(raw)
    except QuantityError as error:
        return [Problem("spec.containers", str(error))]
    return []


def _counted(node: Raw) -> Callable[[str], bool]:
    """GPU resources follow from cards and labels; cpu, memory and pods count where the Node says how many."""
    there = allocatable(node)
    return lambda name: name != SHARE and vocabulary_of(name) is None and (name in there or name not in _OF_THE_NODE)


def result_json(result: Result) -> dict[str, Any]:
    """simulate.md's JSON output, every key present."""
    return {
        "pods": [
            {
                "namespace": outcome.pod.namespace,
                "name": outcome.pod.name,
                "admitted": not outcome.denied,
                "denied": [{"field": p.field, "message": p.message} for p in outcome.denied],
                "patch": outcome.patch,
                "dialect": outcome.dialect,
                "node": outcome.node or None,
                "rejections": outcome.rejections,
                "scores": outcome.scores if outcome.node else {},
                "annotations": outcome.annotations,
                "containers": outcome.containers,
            }
            for outcome in result.outcomes
        ],
        "nodes": nodes_json(result.nodes),
    }
