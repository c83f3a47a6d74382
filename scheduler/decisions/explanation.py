"""Why a pod waits, or where its cards are: what the engine, the accounts and the scheduler say of it, put together.

Nothing is decided here, and nothing is written: the state is the process's own, filled from lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.registry import mixed_vocabulary_problems, vocabularies
from mgpu.model.cards import GPU, CardState
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.ledger import Holding, Share, missing_cards
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import format_bytes
from mgpu.presentation import request_text
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid, read_gpu_pod
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter, Filtered
from scheduler.engine import nvidia_plugin
from scheduler.engine.node_assessment import assess
from scheduler.engine.partitioning.partitionable_node import requested_slices

Raw = Mapping[str, Any]
_TROUBLE = ("DisruptionTarget", "Degraded")
"""Conditions that are true where something is not as it should be; of all others it is the other way round."""


@dataclass(frozen=True, slots=True)
class CardRow:
    """A card as the pod finds it. holders: who else is on it. reason: why it cannot serve; "": it could, or it does.

    own: it is one of the pod's.
    """

    state: CardState
    holders: tuple[str, ...] = ()
    reason: str = ""
    own: bool = False


@dataclass(frozen=True, slots=True)
class NodeRow:
    """reason "": the pod's cards fit, and `points` is the node's score, 0..10. hopeless: no eviction there can help.

    recut: they fit once the node's cards are cut anew.
    """

    name: str
    reason: str = ""
    hopeless: bool = False
    repartitionable: bool = False
    points: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """of: `Pod namespace/name`. stands: `Pending`, `on n1, Running`. ask: (container, what it asks for).

    verdict: sentences, what matters first. nodes: those that fit by their points, then the others by name; of a pod
    that waits. said: what others have written on the pod. chosen: how its cards are, or would be.
    """

    of: str
    stands: str
    dialect: str = ""
    request: tuple[tuple[str, str], ...] = ()
    constraints: Mapping[str, str] = field(default_factory=dict)
    chosen: str = ""
    problems: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    said: tuple[Condition, ...] = ()
    cards: Mapping[str, tuple[CardRow, ...]] = field(default_factory=dict)


class Explainer:
    """state: of all that there is."""

    def __init__(self, state: ClusterCache, settings: Settings) -> None:
        self._state, self._settings = state, settings
        self._filter = Filter(state, settings, budgets=EffortBudgets(sleep=lambda _: None))
        state.forecast.refresh()
        self._filter.refresh()

    def pod(self, raw: Raw, names: Sequence[str], closely: Sequence[str], *, all_cards: bool = False) -> Explanation:
        """names: the nodes to ask about. closely: those whose cards are to be shown, where the pod waits.

        all_cards: also of those where it cannot be whatever their cards are.
        """
        pod, known = read_pod(raw), self._state.gpu_pod(str(raw["metadata"].get("uid")))
        found = Explanation(f"Pod {pod.key}", _stands(pod), said=_conditions(raw))
        if known is None:
            return _with(found, verdict=self._no_gpu_pod(pod, raw))
        if pod.ended:
            known = read_gpu_pod(raw, self._settings) or known  # the state keeps nothing of what it asked for
        problems = (*map(str, known.problems), *map(str, mixed_vocabulary_problems(pod)))
        request = known.request
        if request is not None:
            found = _with(
                found,
                dialect=request.dialect,
                request=tuple(request_text.describe_containers(request)),
                constraints=request.constraints.texts(),
                chosen=self._chosen(request),
            )
        found = _with(found, problems=problems)
        if pod.ended:
            return _with(found, verdict=(f"It has {pod.phase.lower()}, and holds no cards.",))
        if pod.node:
            return self._bound(found, known)
        return self._waiting(found, known, raw, names, closely, all_cards=all_cards)

    def mtgpupod(self, raw: Raw) -> Explanation:
        """Its user has chosen the node, so that there is one to ask about."""
        pod = read_pod(raw)
        found = Explanation(f"MtgpuPod {pod.key}", _stands(pod), mtgpu.NAME, said=_conditions(raw))
        try:
            named = mtgpu.read_mtgpupod(raw)
        except BadObject as error:
            text = "What it asks for cannot be read; a new one like it would be denied."
            return _with(found, problems=tuple(map(str, error.problems)), verdict=(text,))
        share = f"{named.request / 10:g}% to {named.limit / 10:g}% and {format_bytes(named.memory)} of the card"
        found = _with(found, request=((f"all containers, GPUID {named.gpuid}", share),))
        rows = self._rows(named.node, named.uid, {})
        own = tuple(CardRow(r.state, r.holders, r.reason, r.state.card.uuid == named.card_uuid) for r in rows)
        found = _with(found, cards={named.node: own} if rows else {})
        if named.ended:
            return _with(found, verdict=(f"It has {named.phase.lower()}, and holds no card.",))
        return _with(found, verdict=self._of_mtgpupod(named, own))

    def _of_mtgpupod(self, named: mtgpu.MtgpuPod, rows: Sequence[CardRow]) -> tuple[str, ...]:
        if not rows:
            return (f"Node {named.node} has no GPU cards (no Device), or is not there.",)
        if named.card_uuid:
            where = next((f"card {row.state.card.index}" for row in rows if row.own), "a card that the node has not")
            return (f"It is on {where} of {named.node} ({named.card_uuid}).",)
        theirs = next((row.state for row in rows if row.state.gpuid == named.gpuid), None)
        if theirs:
            left = f"{theirs.core_left / 10:g}% and {format_bytes(theirs.memory_left)} are left of it"
            return (f"It waits: GPUID {named.gpuid} has card {theirs.card.index} of {named.node}, and {left}.",)
        idle = f"{sum(row.state.idle and row.state.card.healthy for row in rows)} of its {len(rows)} cards"
        occupier = mtgpu.occupy_name(named.node, named.gpuid)
        text = f"It waits: GPUID {named.gpuid} has no card of {named.node} yet; {idle} are healthy and idle."
        return (text, f"Its occupy pod is {mtgpu.OCCUPY_NAMESPACE}/{occupier}; explain that for more.")

    def _no_gpu_pod(self, pod: Pod, raw: Raw) -> tuple[str, ...]:
        asked = vocabularies(pod)
        if mtgpu.controlling_mtgpupod(raw):
            name = next(o.get("name") for o in raw["metadata"]["ownerReferences"] if o.get("kind") == mtgpu.KIND)
            return (f"It was made for an MtgpuPod, whose card it has: explain mtgpupod/{name}.",)
        if asked:
            name = next(iter(asked))
            return (f"It asks in the vocabulary {name} ({asked[name]}), which the settings do not enable.",)
        return ("It asks for no GPU: mgpu plays no part in where it goes.",)

    def _chosen(self, request: GpuRequest) -> str:
        if requested_slices(request):
            return "slices as the node is cut, or can be cut anew"
        whose = "" if all(c.whole for c in request.containers) else f" ({_whose(request, self._settings)})"
        return f"{request_text.describe_policy(request, self._settings)}{whose}; nodes: {self._settings.node_policy}"

    def _bound(self, found: Explanation, known: GpuPod) -> Explanation:
        pod, node = known.pod, known.pod.node
        held = next((h for h in self._state.holdings(node) if h.uid == pod.uid), None)
        rows = self._rows(node, pod.uid, {})
        if self._state.is_undecided(pod.uid):
            text = f"It is bound to {node} without a readable record of its cards: the scheduler decides them late."
            return _with(found, verdict=(text, *_waits(found)), cards={node: rows})
        if held is None:
            return _with(found, verdict=(f"It is bound to {node}, and holds no card there.",), cards={node: rows})
        own = tuple(CardRow(r.state, r.holders, "", any(s.is_on(r.state.card) for s in held.shares)) for r in rows)
        verdict = [f"{_where(held, own)} of {node}{_by(held)}."]
        if any(share.card is None for share in held.shares):
            verdict = [f"It is on {node}, and nobody can tell on which cards: its share is held on each of them."]
        return _with(found, verdict=(*verdict, *_waits(found)), cards={node: own})

    def _waiting(
        self,
        found: Explanation,
        known: GpuPod,
        raw: Raw,
        names: Sequence[str],
        closely: Sequence[str],
        *,
        all_cards: bool,
    ) -> Explanation:
        # Where it fits once its gates are gone; the gates are told of apart.
        answer = self._filter.filter(replace(known, pod=replace(known.pod, gated=False)), names)
        points = dict(zip(answer.passed, self._filter.scores(known, answer.passed), strict=True))
        nodes = _rows_of(answer, points)
        shown = {name: self._of_node(known, name, all_cards=all_cards) for name in closely if not found.problems}
        return _with(
            found,
            nodes=nodes,
            cards={name: rows for name, rows in shown.items() if rows},
            verdict=tuple(_verdict(found, known.pod, raw, nodes)),
        )

    def _of_node(self, known: GpuPod, name: str, *, all_cards: bool) -> tuple[CardRow, ...]:
        """Per card, what the engine has against it."""
        request, view = known.request, self._state.node_snapshot(name, known.pod.uid, occupied_gpuid(known.pod, name))
        if request is None or view.node is None or (request.unmet_requirement(view.node) and not all_cards):
            return ()
        reasons: dict[int, str] = {}
        if not requested_slices(request) and not nvidia_plugin.chooses_cards(view.node, request):
            seats = self._state.seats(request, known.pod.uid)
            cards = (*view.available_cards, *view.available_other_devices)
            answer = assess(request, view.node, cards, self._settings, seats=seats)
            if isinstance(answer, Rejection):
                reasons = {card.index: card.reason for card in answer.cards if card.type == GPU}
        return self._rows(name, known.pod.uid, reasons)

    def _rows(self, name: str, uid: str, reasons: Mapping[int, str]) -> tuple[CardRow, ...]:
        seen = self._state.cards_and_holdings(name)
        if seen is None:
            return ()
        cards, holdings = seen
        return tuple(
            CardRow(state, _holders(state, holdings, uid), reasons.get(state.card.index, "")) for state in cards
        )


def _holders(state: CardState, holdings: Sequence[Holding], uid: str) -> tuple[str, ...]:
    """Who else is on the card; an occupy pod only where it keeps the card for MtgpuPods that are not there."""
    on = [h for h in holdings if any(share.is_on(state.card) for share in h.shares)]
    users = [h for h in on if not (h.occupies and h.gpuid == state.gpuid)]
    return tuple(sorted(h.key for h in users or on if h.uid != uid))


def _with(found: Explanation, **changes: Any) -> Explanation:
    return replace(found, **changes)


def _rows_of(answer: Filtered, points: Mapping[str, int]) -> tuple[NodeRow, ...]:
    fits = sorted((NodeRow(name, points=points[name]) for name in answer.passed), key=lambda r: (-r.points, r.name))
    repartitionable = set(answer.repartitionable)
    others = [NodeRow(name, why, repartitionable=name in repartitionable) for name, why in answer.failed.items()]
    others += [
        NodeRow(name, why, hopeless=True, repartitionable=name in repartitionable)
        for name, why in answer.hopeless.items()
    ]
    return (*fits, *sorted(others, key=lambda row: row.name))


def _verdict(found: Explanation, pod: Pod, raw: Raw, nodes: Sequence[NodeRow]) -> list[str]:
    if found.problems:
        return ["For this it fits nowhere; a new Pod has to be made, since what a Pod asks for stays as it is."]
    fits, verdict = [row.name for row in nodes if not row.reason], []
    gates = [str(gate.get("name")) for gate in (raw.get("spec") or {}).get("schedulingGates") or ()]
    if gates:
        verdict.append(f"It waits for its scheduling gates first: {', '.join(gates)}.")
    if pod.nominated_node:
        verdict.append(f"Pods are being evicted for it on {pod.nominated_node}; its cards there are kept for it.")
    if not nodes:
        verdict.append("There are no nodes.")
    elif not fits:
        verdict.append(f"Its cards fit on none of {len(nodes):,} node{'s' * (len(nodes) != 1)}.")
        repartitionable = [row.name for row in nodes if row.repartitionable]
        if repartitionable:
            verdict.append(f"They fit once the cards are cut anew, which could be on {', '.join(repartitionable[:5])}.")
    else:
        of = f"{len(fits):,} of {len(nodes):,} node{'s' * (len(nodes) != 1)}"
        verdict.append(f"Its cards fit on {of}, so they are not what it waits for.")
        verdict += [] if gates else _of_scheduler(found, pod)
    return verdict


def _of_scheduler(found: Explanation, pod: Pod) -> list[str]:
    told = any(row.type == "PodScheduled" and row.message for row in found.said)
    if told:
        return ["Taints, selectors, cpu and volumes are the scheduler's: what it says stands below."]
    name = pod.scheduler or "default-scheduler"
    return [f"No scheduler has said anything of it: does {name} run?"]


def _stands(pod: Pod) -> str:
    state = "Terminating" if pod.deleting else pod.phase
    return f"on {pod.node}, {state}" if pod.node else state


def _conditions(raw: Raw) -> tuple[Condition, ...]:
    """Those that say that something is not as it should be, and what containers wait for."""
    status = raw.get("status") or {}
    found = []
    for row in status.get("conditions") or ():
        said = Condition(*(str(row.get(key) or "") for key in ("type", "status", "reason", "message")))
        if said.message and said.status == ("True" if said.type in _TROUBLE else "False"):
            found.append(said)
    for row in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (row.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            message = str(waiting.get("message") or "")
            found.append(Condition(f"container {row.get('name')}", "waiting", str(waiting["reason"]), message))
    if status.get("message"):
        found.append(
            Condition("Pod", str(status.get("phase")), str(status.get("reason") or ""), str(status["message"]))
        )
    return tuple(found)


def _waits(found: Explanation) -> tuple[str, ...]:
    waiting = [row.type for row in found.said if row.status == "waiting"]
    return (f"It has not started: {', '.join(waiting)}; what the kubelet says stands below.",) if waiting else ()


def _where(held: Holding, rows: Sequence[CardRow]) -> str:
    """Whole cards by index; slices and devices of other types, which are not among the rows, by what they are."""
    containers = dict.fromkeys(share.container for share in held.shares)
    return "; ".join(
        f"{name or 'it'} is on {_devices([s for s in held.shares if s.container == name], rows)}" for name in containers
    )


def _devices(shares: Sequence[Share], rows: Sequence[CardRow]) -> str:
    cards = [row.state.card for row in rows]
    on = [str(card.index) for card in cards if any(share.is_on(card) for share in shares)]
    listed = [f"card{'s' * (len(on) > 1)} {', '.join(on)}"] if on else []
    return " and ".join((*listed, *missing_cards(shares, cards)))


def _by(held: Holding) -> str:
    return ", chosen by NVIDIA's own plugin" if held.dialect == nvidia_plugin.NVIDIA else ""


def _whose(request: GpuRequest, settings: Settings) -> str:
    """Whose word the card policy is (docs/design/design.md, "Commands")."""
    dialect = dialects.by_name(request.dialect)
    if request.constraints.card_policy:
        return "the pod's own wish"
    if settings.card_policy_flag:
        return "by flag"
    if dialect.card_policy(settings):
        return f"setting of the dialect {request.dialect}"
    return "setting cardPolicy" if settings.card_policy else f"the default of {request.dialect}"
