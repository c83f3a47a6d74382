"""Explains why a pod waits, or where its cards are, from the engine, the ledger and the pod's own conditions.

`mgpu explain` calls this module, in the scheduler (`scheduler.api.commands`) or on lists of the API server
(`scheduler.listed_cluster`). The reasons must be those of the filter and the engine,
word for word. Nothing is decided or written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from mgpu.model.raw_objects import table_at
from mgpu.presentation import request_text
from mgpu.presentation.claim_views import holder_name
from mgpu.presentation.explanations import CardRow, Condition, Explanation, NodeRow
from mgpu.presentation.gang_views import GangView, describe_gang
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid, read_gpu_pod
from scheduler.decisions import claim_explanation
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.claim_explanation import ClaimExplainer
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter, Filtered
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.engine import FULL, Limits, nvidia_plugin
from scheduler.engine.node_assessment import assess
from scheduler.engine.partitioning.partitionable_node import requested_slices

Raw = Mapping[str, Any]
_HOST_LABEL = "kubernetes.io/hostname"
_MAX_DETAILED_NODES = 8
"""If at most this many nodes have cards, the cards of all nodes are listed."""
_NEGATIVE = ("DisruptionTarget", "Degraded")
"""The types of conditions that report a problem by the status True. All other types report it by False."""


class NoSuchNode(Exception):
    """A node that the user selects does not exist."""


class NotCached(Exception):
    """The pod is not in the cache. The text is its namespace and name."""


class Explainer:
    """Explains objects of the cluster.

    Args:
        state: A cache with all nodes and pods that affect the explanation.
        filter_: The filter to ask. By default, a new one that knows what a policy that learns has learned from `state`.
        gangs: The outlooks to ask. By default, new ones whose searches have the limits FULL.
        limits: The limits of the search for the reasons against the cards of one node.
        pace: A function that is called after each such search. A process that also serves other callers sleeps in it.
        claims: A decider for claims, whose allowances no other caller uses. Without it, claims are not explained.
    """

    def __init__(
        self,
        state: ClusterCache,
        settings: Settings,
        filter_: Filter | None = None,
        gangs: GangOutlooks | None = None,
        limits: Limits = FULL,
        pace: Callable[[], object] = lambda: None,
        claims: ClaimDecider | None = None,
    ) -> None:
        self._state = state
        self._settings = settings
        self._filter = filter_ or _fresh_filter(state, settings)
        self._gangs = gangs or GangOutlooks(state, self._filter, settings)
        self._limits = limits
        self._pace = pace
        self._claims = ClaimExplainer(state, settings, claims, self._card_rows, pace) if claims else None

    def object(self, kind: str, raw: Raw, names: Sequence[str], selected: Sequence[str] = ()) -> Explanation:
        """Explain a Pod, an MtgpuPod or a ResourceClaim.

        Args:
            kind: The kind of the object.
            names: The sorted names of all nodes.
            selected: The nodes to which the user limits the explanation of an object that waits; () for no limit.

        Raises:
            NoSuchNode: if a selected node does not exist.
            NotCached: if the pod is not in the cache.
        """
        unknown = sorted(set(selected) - set(names))
        if unknown:
            raise NoSuchNode(f"no node is named {', '.join(unknown)}")
        if kind == mtgpu.KIND:
            return self.mtgpupod(raw)
        if kind == claim_explanation.KIND and self._claims is not None:
            return self._claims.claim(raw, selected)
        meta = raw["metadata"]
        if self._state.uid_of(meta["namespace"], meta["name"]) != meta["uid"]:
            raise NotCached(f"{meta['namespace']}/{meta['name']}")
        with_cards = self._state.nodes_with_cards()
        detailed = selected or (with_cards if len(with_cards) <= _MAX_DETAILED_NODES else ())
        if self._claims is not None and self._state.gpu_pod(str(meta["uid"])) is None:
            pod = read_pod(raw)
            explanation = Explanation(f"Pod {pod.key}", _status(pod), conditions=_conditions(raw))
            by_claims = None if pod.ended else self._claims.pod(explanation, raw, selected)
            if by_claims is not None:
                return by_claims
        return self.pod(raw, list(dict.fromkeys(selected)) or names, detailed, all_cards=bool(selected))

    def pod(self, raw: Raw, names: Sequence[str], detailed: Sequence[str], *, all_cards: bool = False) -> Explanation:
        """Explain a pod.

        Args:
            names: The nodes to evaluate if the pod waits.
            detailed: The nodes whose cards to include if the pod waits.
            all_cards: Whether to include also the cards of nodes that do not meet a requirement of the request.
        """
        pod = read_pod(raw)
        gpu_pod = self._state.gpu_pod(str(raw["metadata"].get("uid")))
        explanation = Explanation(f"Pod {pod.key}", _status(pod), conditions=_conditions(raw))
        if gpu_pod is None:
            return replace(explanation, verdict=(_without_request(pod, raw),))
        if pod.ended:
            gpu_pod = read_gpu_pod(raw, self._settings) or gpu_pod  # The cache has no requests of ended pods.
        request = gpu_pod.request
        if request is not None:
            explanation = replace(
                explanation,
                dialect=request.dialect,
                request=tuple(request_text.describe_containers(request)),
                constraints=request.constraints.texts(),
                policy=self._policy(request),
            )
        explanation = replace(
            explanation, problems=(*map(str, gpu_pod.problems), *map(str, mixed_vocabulary_problems(pod)))
        )
        if pod.ended:
            return replace(explanation, verdict=(f"It has {pod.phase.lower()}, and holds no cards.",))
        if pod.node:
            return self._bound(explanation, gpu_pod)
        # The filter would reject a gated pod on all nodes. So the nodes are evaluated as if the pod had no gates.
        ungated = replace(gpu_pod, pod=replace(gpu_pod.pod, gates=()))
        result = self._filter.filter(ungated, names)
        points = dict(zip(result.passed, self._filter.scores(gpu_pod, result.passed), strict=True))
        nodes = _node_rows(result, points)
        cards = {name: self._candidate_cards(gpu_pod, name, all_cards=all_cards) for name in detailed}
        explanation = replace(explanation, gates=pod.gates, gang=self._gang(pod))
        return replace(
            explanation,
            nodes=nodes,
            cards={} if explanation.problems else {name: rows for name, rows in cards.items() if rows},
            verdict=tuple(_verdict(explanation, pod, raw, nodes)),
        )

    def mtgpupod(self, raw: Raw) -> Explanation:
        """Explain an MtgpuPod. Only one node is possible for it, which its user has chosen."""
        pod = read_pod(raw)
        explanation = Explanation(f"MtgpuPod {pod.key}", _status(pod), mtgpu.NAME, conditions=_conditions(raw))
        try:
            mtgpupod = mtgpu.read_mtgpupod(raw)
        except BadObject as error:
            text = "Its request is invalid; admission would deny a new MtgpuPod like it."
            return replace(explanation, problems=tuple(map(str, error.problems)), verdict=(text,))
        fractions = f"{mtgpupod.request / 10:g}% to {mtgpupod.limit / 10:g}%"
        share = f"{fractions} and {format_bytes(mtgpupod.memory)} of the card"
        rows = self._card_rows(mtgpupod.node, mtgpupod.uid)
        rows = tuple(replace(row, own=row.state.card.uuid == mtgpupod.card_uuid) for row in rows)
        explanation = replace(
            explanation,
            request=((f"all containers, GPUID {mtgpupod.gpuid}", share),),
            cards={mtgpupod.node: rows} if rows else {},
        )
        if mtgpupod.ended:
            return replace(explanation, verdict=(f"It has {mtgpupod.phase.lower()}, and holds no card.",))
        return replace(explanation, verdict=_mtgpupod_verdict(mtgpupod, rows))

    def _gang(self, pod: Pod) -> GangView | None:
        """Return the gang of a pod that waits, on all nodes, since its members may be anywhere."""
        view = self._gangs.of(pod)
        return self._gangs.with_outlook(view, sorted(self._state.node_versions())) if view else None

    def _policy(self, request: GpuRequest) -> str:
        if requested_slices(request):
            return "slices of the node's partitions, or of partitions that a plan makes"
        text = request_text.describe_policy(request, self._settings)
        if not all(container.whole for container in request.containers):
            text += f" ({_policy_origin(request, self._settings)})"
        return f"{text}; nodes: {self._settings.node_policy}"

    def _bound(self, explanation: Explanation, gpu_pod: GpuPod) -> Explanation:
        pod = gpu_pod.pod
        rows = self._card_rows(pod.node, pod.uid)
        holding = next((h for h in self._state.holdings(pod.node) if h.uid == pod.uid), None)
        if self._state.is_undecided(pod.uid):
            text = (
                f"It is bound to {pod.node} without a valid allocation record, and waits for a late binding decision."
            )
        elif holding is None:
            text = f"It is bound to {pod.node}, and holds no card there."
            return replace(explanation, verdict=(text,), cards={pod.node: rows})
        else:
            rows = tuple(replace(row, own=any(s.is_on(row.state.card) for s in holding.shares)) for row in rows)
            text = _holding_text(holding, rows, pod.node)
        return replace(explanation, verdict=(text, *_waiting_containers(explanation)), cards={pod.node: rows})

    def _candidate_cards(self, gpu_pod: GpuPod, name: str, *, all_cards: bool) -> tuple[CardRow, ...]:
        """Return the cards of a node that may take the pod, each with the engine's reason against the card."""
        uid = gpu_pod.pod.uid
        request = gpu_pod.request
        snapshot = self._state.node_snapshot(name, uid, occupied_gpuid(gpu_pod.pod, name))
        if request is None or snapshot.node is None or (request.unmet_requirement(snapshot.node) and not all_cards):
            return ()
        reasons: dict[int, str] = {}
        if not requested_slices(request) and not nvidia_plugin.chooses_cards(snapshot.node, request):
            cards = (*snapshot.available_cards, *snapshot.available_other_devices)
            group_cards = self._state.group_cards(request, uid)
            answer = assess(request, snapshot.node, cards, self._settings, group_cards=group_cards, limits=self._limits)
            self._pace()
            if isinstance(answer, Rejection):
                reasons = {card.index: card.reason for card in answer.cards if card.type == GPU}
        return tuple(replace(row, reason=reasons.get(row.state.card.index)) for row in self._card_rows(name, uid))

    def _card_rows(self, name: str, uid: str) -> tuple[CardRow, ...]:
        contents = self._state.cards_and_holdings(name)
        if contents is None:
            return ()
        cards, holdings = contents
        return tuple(CardRow(state, _holders(state, holdings, uid)) for state in cards)


def _fresh_filter(state: ClusterCache, settings: Settings) -> Filter:
    filter_ = Filter(state, settings, budgets=EffortBudgets(sleep=lambda _: None))
    state.forecast.refresh()
    filter_.refresh()
    return filter_


def _without_request(pod: Pod, raw: Raw) -> str:
    if mtgpu.controlling_mtgpupod(raw):
        name = next(o.get("name") for o in raw["metadata"]["ownerReferences"] if o.get("kind") == mtgpu.KIND)
        return f"It was created for an MtgpuPod and has the card of that MtgpuPod; explain mtgpupod/{name}."
    for name, resource in vocabularies(pod).items():
        return f"It requests GPUs in the vocabulary {name} ({resource}), which the settings do not enable."
    return "It requests no GPU, so mgpu does not affect its scheduling."


def _mtgpupod_verdict(pod: mtgpu.MtgpuPod, rows: Sequence[CardRow]) -> tuple[str, ...]:
    if not rows:
        return (f"Node {pod.node} has no GPU cards (no Device), or does not exist.",)
    if pod.card_uuid:
        card = next((f"card {row.state.card.index}" for row in rows if row.own), "a card that the node does not have")
        return (f"It is on {card} of {pod.node} ({pod.card_uuid}).",)
    shared = next((row.state for row in rows if row.state.gpuid == pod.gpuid), None)
    if shared:
        free = f"{shared.core_left / 10:g}% and {format_bytes(shared.memory_left)} of it are free"
        return (f"It waits: GPUID {pod.gpuid} has card {shared.card.index} of {pod.node}, and {free}.",)
    idle = sum(row.state.idle and row.state.card.healthy for row in rows)
    text = f"It waits: GPUID {pod.gpuid} has no card of {pod.node} yet"
    occupier = f"{mtgpu.OCCUPY_NAMESPACE}/{mtgpu.occupy_name(pod.node, pod.gpuid)}"
    return (
        f"{text}; {idle} of its {len(rows)} cards are healthy and idle.",
        f"Its occupy pod is {occupier}; explain that pod for more.",
    )


def _holders(state: CardState, holdings: Sequence[Holding], uid: str) -> tuple[str, ...]:
    """Return the others on the card. The occupy pod is omitted if any other pod holds a share of the card."""
    on_card = [h for h in holdings if any(share.is_on(state.card) for share in h.shares)]
    users = [h for h in on_card if not (h.occupies and h.gpuid == state.gpuid)]
    return tuple(sorted(holder_name(h) for h in users or on_card if h.uid != uid))


def _node_rows(result: Filtered, points: Mapping[str, int]) -> tuple[NodeRow, ...]:
    fits = sorted((NodeRow(name, points=points[name]) for name in result.passed), key=lambda r: (-r.points, r.name))
    repartitionable = frozenset(result.repartitionable)
    others = [
        NodeRow(name, reason, unresolvable=name in result.hopeless, repartitionable=name in repartitionable)
        for name, reason in (*result.failed.items(), *result.hopeless.items())
    ]
    return (*fits, *sorted(others, key=lambda row: row.name))


def _verdict(explanation: Explanation, pod: Pod, raw: Raw, nodes: Sequence[NodeRow]) -> list[str]:
    if explanation.problems:
        return ["It fits on no node for this reason. Create a new Pod, since the request of a Pod cannot change."]
    verdict = []
    if explanation.gates:
        verdict.append(f"It waits for its scheduling gates first: {request_text.describe_gates(explanation.gates)}.")
    if pod.nominated_node:
        verdict.append(f"It is nominated to {pod.nominated_node}, where cards are kept free for it.")
    if explanation.gang:
        verdict.append(f"It is a member of gang {explanation.gang.name}: {describe_gang(explanation.gang)}.")
    fits = sum(row.reason is None for row in nodes)
    total = f"{len(nodes):,} node{'s' * (len(nodes) != 1)}"
    pinned = _pinned_row(raw, nodes)
    if not nodes:
        verdict.append("There are no nodes.")
    elif pinned is not None and pinned.reason is not None:
        verdict.append(f"Its nodeSelector allows only {pinned.name}, where its cards do not fit: {pinned.reason}.")
        verdict.append(f"Without the nodeSelector they fit on {fits:,} of {total}.")
    elif not fits:
        verdict.append(f"Its cards fit on none of {total}.")
        repartitionable = [row.name for row in nodes if row.repartitionable]
        if repartitionable:
            verdict.append(f"They would fit if cards were partitioned again, on {', '.join(repartitionable[:5])}.")
    elif explanation.gang and explanation.gang.needed is not None and not explanation.gang.fits:
        verdict.append(f"Its own cards fit on {fits:,} of {total}.")
    else:
        verdict.append(f"Its cards fit on {fits:,} of {total}, so it does not wait for cards.")
        if not explanation.gates:
            verdict.append(_scheduler_verdict(explanation, pod))
    return verdict


def _pinned_row(raw: Raw, nodes: Sequence[NodeRow]) -> NodeRow | None:
    """Return the node that the pod's nodeSelector names, as Kueue sets it for a topology of hosts, or None."""
    host = table_at(raw, "spec", "nodeSelector").get(_HOST_LABEL)
    return next((row for row in nodes if row.name == host), None)


def _scheduler_verdict(explanation: Explanation, pod: Pod) -> str:
    if any(row.type == "PodScheduled" and row.message for row in explanation.conditions):
        return "The scheduler also considers taints, selectors, cpu and volumes; its message is below."
    return f"No scheduler has reported on it: does {pod.scheduler or 'default-scheduler'} run?"


def _status(pod: Pod) -> str:
    state = "Terminating" if pod.deleting else pod.phase
    return f"on {pod.node}, {state}" if pod.node else state


def _conditions(raw: Raw) -> tuple[Condition, ...]:
    """Return the conditions that report a problem, what containers wait for, and the message of the status."""
    status = raw.get("status") or {}
    rows = []
    for row in status.get("conditions") or ():
        condition = Condition(*(str(row.get(key) or "") for key in ("type", "status", "reason", "message")))
        if condition.message and condition.status == ("True" if condition.type in _NEGATIVE else "False"):
            rows.append(condition)
    for row in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (row.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            message = str(waiting.get("message") or "")
            rows.append(Condition(f"container {row.get('name')}", "waiting", str(waiting["reason"]), message))
    if status.get("message"):
        reason = str(status.get("reason") or "")
        rows.append(Condition("Pod", str(status.get("phase")), reason, str(status["message"])))
    return tuple(rows)


def _waiting_containers(explanation: Explanation) -> tuple[str, ...]:
    waiting = [row.type for row in explanation.conditions if row.status == "waiting"]
    return (f"It has not started: {', '.join(waiting)}; the message of the kubelet is below.",) if waiting else ()


def _holding_text(holding: Holding, rows: Sequence[CardRow], node: str) -> str:
    """Return a text that says which devices each container has. It shows GPUs by index and other devices by name."""
    if any(share.card is None for share in holding.shares):
        return f"It is on {node}, but its cards are unknown: its share is counted on every card there."
    containers = dict.fromkeys(share.container for share in holding.shares)
    texts = (
        f"{name or 'it'} is on {_devices_text([s for s in holding.shares if s.container == name], rows)}"
        for name in containers
    )
    by = ", chosen by NVIDIA's device plugin" if holding.dialect == nvidia_plugin.NVIDIA else ""
    return f"{'; '.join(texts)} of {node}{by}."


def _devices_text(shares: Sequence[Share], rows: Sequence[CardRow]) -> str:
    cards = [row.state.card for row in rows]
    indexes = [str(card.index) for card in cards if any(share.is_on(card) for share in shares)]
    listed = [f"card{'s' * (len(indexes) > 1)} {', '.join(indexes)}"] if indexes else []
    return " and ".join((*listed, *missing_cards(shares, cards)))


def _policy_origin(request: GpuRequest, settings: Settings) -> str:
    """Return where the card policy is set (docs/design/design.md, "Commands")."""
    if request.constraints.card_policy:
        return "annotation of the pod"
    if settings.card_policy_flag:
        return "flag"
    if dialects.by_name(request.dialect).card_policy(settings):
        return f"setting of the dialect {request.dialect}"
    return "setting cardPolicy" if settings.card_policy else f"the default of {request.dialect}"
