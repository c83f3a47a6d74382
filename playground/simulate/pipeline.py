"""mutate → validate → filter → score → bind → allocate, pod after pod, by the functions of the three processes."""

from collections.abc import Callable
from dataclasses import replace

import jsonpatch

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.node_resources import SHARE
from mgpu.dialects.vocabulary import vocabularies, vocabulary_of
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.ledger import Holding
from mgpu.model.node_requests import add, allocatable, requests_of
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import QuantityError
from mgpu.presentation.card_views import NodeView, views
from mgpu.presentation.overview import NO_RECORD, STOCK, claim, missing, request_of
from mgpu.settings import Settings
from playground import fit
from playground.simulate.accounts import Accounts, Recutting
from playground.simulate.mtgpupods import MtgpuPods
from playground.simulate.outcomes import Delivery, Outcome, Result
from playground.simulate.world import Raw, World
from scheduler.cluster.gpu_pods import GpuPod, occupies
from scheduler.decisions.scores import Ranking
from scheduler.engine import nvidia_plugin
from scheduler.engine.assessment import Foresight, assess, record, score
from webhook.mtgpupods import validate_mtgpupod_create
from webhook.mutate import mutate
from webhook.validate import strange_wishes, validate_create

_OF_THE_NODE = ("cpu", "memory", "ephemeral-storage", "pods")


def simulate(world: World, settings: Settings, note: Callable[[str], None]) -> Result:
    """note: told, in a line each, what is odd about pods that run already."""
    cluster = _Cluster(world, settings, note)
    for name, cutting in cluster.accounts.cuttings.items():
        if cutting.problem:
            note(f"node {name}: what it says of its slices is not taken: {cutting.problem}")
    cluster.take_in(world)
    outcomes = [cluster.submit(raw) for raw in world.submitted]
    return Result(outcomes, cluster.seen())


class _Cluster:
    def __init__(self, world: World, settings: Settings, note: Callable[[str], None]) -> None:
        self._settings, self._note = settings, note
        self.accounts = Accounts(world, settings)
        self._ranking = Ranking(self.accounts, settings)
        self._recutting = Recutting(self.accounts, settings)
        self._names: dict[str, Raw] = {}
        self._mtgpupods = MtgpuPods(self.accounts, settings, self._names, self.submit, self._unfit)

    def take_in(self, world: World) -> None:
        """Records first: cards that somebody holds must be known before any are decided late."""
        running = self._wanted(world)
        given = {name: {**world.given.get(name, {}), **cut.given()} for name, cut in self.accounts.cuttings.items()}
        unknown = {uid: Holding(uid, "", "", node, STOCK, rows[uid]) for node, rows in given.items() for uid in rows}
        undecided: list[tuple[Pod, GpuRequest]] = []
        for raw in running:
            pod = read_pod(raw)
            request = request_of(pod, self._settings)
            unknown.pop(pod.uid, None)
            self._names[pod.key] = raw
            if isinstance(request, GpuRequest):
                self.accounts.outlook.saw(pod, request)
            if pod.ended:
                continue
            self.accounts.reserve(pod, raw, pod.node)
            found = claim(pod, request, given.get(pod.node, {}).get(pod.uid, ()))
            if found.holding:
                self._hold(pod, request, found.holding)
            if found.problem == NO_RECORD and isinstance(request, GpuRequest):
                undecided.append((pod, request))
            elif found.problem:
                self._note(f"pod {pod.key}: {found.problem}")
        for holding in unknown.values():
            self.accounts.hold(holding)
        self._mtgpupods.take_in(world.mtgpupods, running, self._note)
        self._recutting.restore()
        for holding in (held for held in self.accounts.ledger.holdings() if held.dialect != mtgpu.NAME):
            odd = missing(holding, (state.card for state in self.accounts.devices(holding.node)))
            if odd:
                self._note(f"pod {holding.key}: {odd}")
        self._learn()
        for pod, request in undecided:
            self._decide_late(pod, request)
        for raw in running:
            self._mtgpupods.follow(read_pod(raw))
        self._mtgpupods.settle()

    def _hold(self, pod: Pod, request: GpuRequest | BadObject | None, holding: Holding) -> None:
        self.accounts.hold(holding)
        if isinstance(request, GpuRequest):
            self.accounts.outlook.placed(pod, request)

    def _wanted(self, world: World) -> list[Raw]:
        """The running pods, without those that keep a card for MtgpuPods that are not there: they are swept."""
        named = [read_pod(raw) for raw in (*world.mtgpupods, *world.submitted) if raw["kind"] == mtgpu.KIND]
        needed = {(pod.node, pod.annotations.get(mtgpu.GPUID)) for pod in named}
        running = []
        for raw in world.running:
            pod = read_pod(raw)
            found = mtgpu.occupied(pod)
            if found and found not in needed and mtgpu.enabled(self._settings):
                self._note(f"pod {pod.key}: is left out; no MtgpuPod needs its card, so it is deleted")
            else:
                running.append(raw)
        return running

    def seen(self) -> tuple[NodeView, ...]:
        """At the end."""
        self._mtgpupods.tell_containers()
        return views(self.accounts.ledger, self.accounts.sliced())

    def _unfit(self, raw: Raw, node: str, before: int) -> str:
        """As a kubelet asks of a Pod that has its node from the start: nobody has looked at taints and cordons."""
        known = {**self.accounts.raw[node], "spec": {}}
        used = add(self.accounts.used[node], {"pods": before})
        reasons = fit.fits(raw, known, used, _counted(known))
        return reasons[0] if reasons else ""

    def _decide_late(self, pod: Pod, request: GpuRequest) -> None:
        placement = self._assess(pod, request, pod.node)
        if isinstance(placement, Rejection) and self._recutting.recut(pod, request, [pod.node]):
            placement = self._assess(pod, request, pod.node)
        if isinstance(placement, Placement):
            self.accounts.place(pod, request, placement, pod.node)
            self.accounts.outlook.placed(pod, request)
        else:
            self._note(f"pod {pod.key}: no cards on {pod.node}: {placement}")

    def _learn(self) -> None:
        if self.accounts.outlook.refresh():
            self._ranking.refresh()

    def submit(self, raw: Raw) -> Outcome:
        if raw["kind"] == mtgpu.KIND:
            return self._submit_mtgpupod(raw)
        outcome = Outcome(read_pod(raw))
        raw = self._admit(outcome, raw)
        if outcome.denied:
            return outcome
        self._names[outcome.pod.key] = raw
        request = dialects.read_request(outcome.pod, self._settings)
        if request is not None:
            self.accounts.outlook.saw(outcome.pod, request)
            self._learn()
        placements = self._filter(outcome, raw, request)
        if placements:
            node = min(placements, key=lambda name: (-outcome.scores.get(name, 0), name))
            self._bind(outcome, raw, request, placements[node], node)
            if request is not None:
                self.accounts.outlook.placed(outcome.pod, request)
        waits = "; ".join(f"{name}: {why}" for name, why in outcome.rejections.items())
        self._mtgpupods.follow(replace(outcome.pod, node=outcome.node), waits)
        return outcome

    def _submit_mtgpupod(self, raw: Raw) -> Outcome:
        outcome = Outcome(read_pod(raw), dialect=mtgpu.NAME, kind=mtgpu.KIND)
        outcome.denied = validate_mtgpupod_create(raw, self._settings) or _unreadable(raw)
        if not outcome.denied:
            self._mtgpupods.submit(raw, outcome)
        return outcome

    def _admit(self, outcome: Outcome, raw: Raw) -> Raw:
        outcome.dialect = next(iter(vocabularies(outcome.pod)), None)
        outcome.patch = [dict(operation) for operation in mutate(raw, self._settings).patch]
        raw = jsonpatch.apply_patch(raw, outcome.patch)
        outcome.denied = validate_create(raw, self._settings) or _unreadable(raw)
        if outcome.pod.key in self._names and not outcome.denied:
            outcome.denied = [Problem("metadata.name", "is the name of a Pod that has been made for MtgpuPods already")]
        for warning in strange_wishes(raw, None):
            self._note(f"pod {outcome.pod.key}: {warning}")
        outcome.pod = read_pod(raw)
        return raw

    def _filter(self, outcome: Outcome, raw: Raw, request: GpuRequest | None) -> dict[str, Placement | None]:
        """The nodes that can take the pod, each with its cards (None: it asks for none); the others are told why.

        Where it fits on none, but one could be cut so that it does, that one is.
        """
        placements: dict[str, Placement | None] = {}
        tried: list[str] = []
        for name, node in self.accounts.raw.items():
            reasons = fit.fits(raw, node, self.accounts.used[name], _counted(node))
            if reasons:
                outcome.rejections[name] = ", ".join(reasons)
            elif request is None and outcome.dialect:
                outcome.rejections[name] = f"no node serves {outcome.dialect} pods"
            elif request is None:
                placements[name] = None
            else:
                tried.append(name)
                self._try(outcome, request, name, placements)
        if request is not None and not placements:
            anew = self._recutting.recut(outcome.pod, request, tried)
            if anew:
                self._try(outcome, request, anew, placements)
        points = self._ranking.points(GpuPod(outcome.pod, request), list(placements))
        if points is not None:
            outcome.scores = dict(zip(placements, points, strict=True))
        return placements

    def _try(self, outcome: Outcome, request: GpuRequest, name: str, placements: dict[str, Placement | None]) -> None:
        outcome.rejections.pop(name, None)
        found = self._assess(outcome.pod, request, name)
        if isinstance(found, Rejection):
            outcome.rejections[name] = str(found)
            return
        placements[name] = found
        points = self._recutting.score(outcome.pod, request, name)
        if points is None:
            devices = self.accounts.devices(name, "", occupies(outcome.pod, name))
            points = score(request, found, devices, self._settings)
        outcome.scores[name] = points

    def _assess(self, pod: Pod, request: GpuRequest, node: str) -> Placement | Rejection:
        gpuid = occupies(pod, node)
        view, seats = self.accounts.view(node, pod.uid), self.accounts.seats(request, pod.uid)
        known, devices = self.accounts.nodes[node], self.accounts.devices(node, pod.uid, gpuid)
        if nvidia_plugin.chooses(known, request):
            ours = nvidia_plugin.given_by_mgpu(self.accounts.ledger, node, pod.uid, gpuid)
            refused = nvidia_plugin.refusal(request, known, view.cards, ours)
            return refused or assess(request, known, devices, self._settings)  # one of the choices that the plugin has
        refusal = request.unmet(known) is None and self._recutting.refusal(pod, request, node)
        if refusal:
            return refusal
        foresight = Foresight(self.accounts.outlook.judges, view.room, pod.needs)
        return assess(request, known, devices, self._settings, foresight, seats=seats)

    def _bind(
        self, outcome: Outcome, raw: Raw, request: GpuRequest | None, placement: Placement | None, node: str
    ) -> None:
        outcome.node = node
        self.accounts.reserve(outcome.pod, raw, node)
        if request is None or placement is None:
            return
        devices = self.accounts.devices(node)
        if not nvidia_plugin.chooses(self.accounts.nodes[node], request):
            outcome.annotations = record(outcome.pod, request, placement, devices, self._settings, now_ns=0)
        self.accounts.place(outcome.pod, request, placement, node)
        cards, gpus = [state.card for state in devices], self.accounts.cuttings[node].gpus
        outcome.containers = Delivery(outcome.pod, request, placement, cards, gpus, self._settings).containers()


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
