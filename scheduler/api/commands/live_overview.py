"""Makes the view of the cluster that `mgpu inspect` and `mgpu top` show, from the scheduler's cache.

The commands make the same view from lists of the API server (`mgpu.presentation.overview`). For the same objects both
must be equal (tests/scheduler/api/commands/test_live_overview.py). The scheduler's view also has what only this process
knows: reservations, and which allocation records have a valid seal.

A node is viewed again only if it has changed, and is stored as compressed JSON, because the same process answers
kube-scheduler, and memory is limited.
"""

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.pod_constraints import NO_CONSTRAINTS
from mgpu.model.pods import read_pod
from mgpu.model.slice_names import MIG_CLAIMS
from mgpu.presentation.answers import ClusterAnswer, encode_cluster, encode_node
from mgpu.presentation.claim_views import ClaimViews, selects_our_devices, view_claims
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.mtgpupod_tables import MtgpuPods, by_container, missing_card, read_mtgpupods
from mgpu.presentation.overview import (
    BARE,
    NO_RECORD,
    UNRECORDED,
    Overview,
    describe_missing_cards,
    list_groups,
    possible_instances,
)
from scheduler.api.page.page_data import view_of
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, recorded_shares
from scheduler.cluster.node_snapshots import NodeContents
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.engine import nvidia_plugin

Raw = Mapping[str, Any]
EVERY_SECONDS = 1.0
"""How long an answer is given again. All callers of this time share it."""
_OUTLOOK_SECONDS = 5.0
"""How long the outlooks of gangs are given again, since each needs the engine."""
_MOST_OUTLOOKS = 20
"""The most gangs for which the engine examines which members fit. `mgpu inspect` has the same limit."""
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to `GET /commands/cluster`.

    Attributes:
        body: the lines of the answer, compressed with gzip.
        tag: changes whenever the lines change.
        at: the time at which the cache was read, of the clock of `LiveOverview`.
    """

    body: bytes
    tag: str
    at: float


@dataclass(frozen=True, slots=True)
class _Node:
    """What is stored about a node.

    Attributes:
        version: the version of the node in the cache.
        packed: the JSON of its view, compressed.
        settled: the UIDs of the pods whose cards are known and exist. Nothing about them is unclear.
        grouped: its holdings that belong to groups, with the cards of the node; None if there are none.
        problem: why its annotations about slices cannot be read, or "".
    """

    version: int
    packed: bytes
    settled: frozenset[str]
    grouped: NodeContents | None
    problem: str


class LiveOverview:
    """The view of the cluster, for all callers together. Thread-safe.

    `_lock` is held while one caller makes an answer. The others wait for it.
    """

    def __init__(
        self,
        state: ClusterCache,
        gangs: GangOutlooks,
        replica: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        pace: Callable[[], object] | None = None,
    ) -> None:
        self._state = state
        self._gangs = gangs
        self._replica = replica
        self._clock = clock
        self._pace = pace or Pace(pause_ratio=0.5)
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._answer: Answer | None = None
        self._outlooks: dict[GangView, GangView] = {}
        self._outlooks_at = -_OUTLOOK_SECONDS

    def answer(self) -> Answer:
        with self._lock:
            last = self._answer
            if last is None or self._clock() - last.at >= EVERY_SECONDS:
                last = self._answer = self._make(self._clock())
            return last

    def _make(self, now: float) -> Answer:
        mtgpupods = list(self._state.mtgpupods.objects())
        self._read_nodes({str(raw["metadata"].get("uid")): raw for raw in mtgpupods})
        names = sorted(self._nodes)
        answer = ClusterAnswer(
            self._overview(read_mtgpupods(mtgpupods, ())), self._incomplete_gangs(names, now), self._replica()
        )
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # 16: in the format of gzip
        digest = hashlib.sha256()
        parts = []
        for line in encode_cluster(answer, (zlib.decompress(self._nodes[name].packed) for name in names)):
            digest.update(line)
            parts.append(packer.compress(line))
            self._pace()
        parts.append(packer.flush())
        return Answer(b"".join(parts), digest.hexdigest()[:32], now)

    def _read_nodes(self, mtgpupods: Mapping[str, Raw]) -> None:
        """View the nodes that have changed.

        Args:
            mtgpupods: all MtgpuPods by UID.
        """
        versions = self._state.node_versions()
        for name, version in versions.items():
            known = self._nodes.get(name)
            if known is None or known.version != version:
                contents = self._state.node_contents(name)
                if contents is None:
                    self._nodes.pop(name, None)
                else:
                    self._nodes[name] = _stored(contents, version, mtgpupods)
                self._pace()
        for name in self._nodes.keys() - versions.keys():
            del self._nodes[name]

    def _overview(self, mtgpupods: MtgpuPods) -> Overview:
        """Return the overview without its nodes."""
        pods = self._state.gpu_pods()
        waiting = [g for g in pods if not g.pod.node and not g.pod.ended]
        views = mtgpupods.views
        unclear = {f"Node {name}": node.problem for name, node in self._nodes.items() if node.problem}
        unclear |= self._state.unreadable_objects()
        unclear |= dict(self._unclear_pods(pods))
        unclear |= mtgpupods.unclear
        cards = {name: self._state.cards(name) for name in {view.pod.node for view in views}}
        problems = ((view.pod.key, missing_card(view, cards[view.pod.node])) for view in views)
        unclear |= {f"MtgpuPod {key}": problem for key, problem in problems if problem}
        claims = self._claims()
        unclear |= dict(self._unclear_claims(claims))
        without_card = (v.pod.key for v in views if not v.pod.card_uuid)
        constrained = (g for g in pods if g.constraints != NO_CONSTRAINTS and not g.pod.ended)
        constraints = {g.pod.key: g.constraints for g in constrained} | dict(claims.constraints)
        return Overview(
            (),
            tuple(sorted([*(g.pod.key for g in waiting), *without_card, *claims.waiting])),
            dict(sorted(unclear.items())),
            dict(sorted(constraints.items())),
            list_groups(self._grouped()),
            views,
            self._state.agents_not_ready(),
            {g.pod.key: g.pod.gates for g in _by_key(waiting) if g.pod.gated},
        )

    def _unclear_pods(self, pods: Sequence[GpuPod]) -> Iterator[tuple[str, str]]:
        nothing: frozenset[str] = frozenset()
        for gpu_pod in pods:
            pod = gpu_pod.pod
            node = self._nodes.get(pod.node)
            if pod.ended or pod.uid in (node.settled if node else nothing):
                continue
            problem = "; ".join(map(str, gpu_pod.problems))
            if pod.node:
                held = self._state.holdings(pod.node)
                holding = next((holding for holding in held if holding.uid == pod.uid), None)
                problem = _problem_of(gpu_pod, holding)
                if not problem and holding is not None:
                    problem = describe_missing_cards(holding, self._state.cards(pod.node)) or ""
            if problem:
                yield f"Pod {pod.key}", problem

    def _claims(self) -> ClaimViews:
        claims = self._state.claims
        return view_claims(claims.items(), lambda name: selects_our_devices(claims.class_selectors(name)))

    def _unclear_claims(self, claims: ClaimViews) -> Iterator[tuple[str, str]]:
        of_instances = frozenset(self._state.nodes_for_instances())
        for holding in claims.holdings:
            gpus = self._state.gpus(holding.node) if holding.node in of_instances else ()
            instances = possible_instances(MIG_CLAIMS, gpus)
            problem = describe_missing_cards(holding, (*self._state.cards(holding.node), *instances))
            if problem:
                yield f"ResourceClaim {holding.key}", problem

    def _grouped(self) -> Ledger:
        """Return a ledger with all holdings that belong to groups, and the cards of their nodes."""
        ledger = Ledger()
        for name, node in self._nodes.items():
            if node.grouped is not None:
                ledger.set_cards(name, (*node.grouped.cards, *node.grouped.other_devices))
                for holding in node.grouped.held:
                    ledger.hold(holding)
        return ledger

    def _incomplete_gangs(self, nodes: Sequence[str], now: float) -> tuple[GangView, ...]:
        views = self._gangs.incomplete(self._state.gpu_pods())
        if now - self._outlooks_at >= _OUTLOOK_SECONDS:
            self._outlooks = {}
            self._outlooks_at = now
        for view in views[:_MOST_OUTLOOKS]:
            if view not in self._outlooks:
                self._outlooks[view] = self._with_outlook(view, nodes)
        return tuple(self._outlooks.get(view, view) for view in views)

    def _with_outlook(self, view: GangView, nodes: Sequence[str]) -> GangView:
        try:
            return self._gangs.with_outlook(view, nodes)
        except RetryLater:
            return view  # Too many long calls run. The gang is shown without its outlook, as any gang beyond the limit.


def _by_key(pods: Sequence[GpuPod]) -> list[GpuPod]:
    return sorted(pods, key=lambda g: g.pod.key)


def _stored(contents: NodeContents, version: int, mtgpupods: Mapping[str, Raw]) -> _Node:
    contents = replace(contents, held=tuple(_by_container(holding, mtgpupods) for holding in contents.held))
    devices = (*contents.cards, *contents.other_devices)
    named = {(card.type, key) for card in devices for key in (card.index, card.uuid)}
    settled = frozenset(
        holding.uid
        for holding in contents.held
        if holding.bound and all((share.type, share.card) in named for share in holding.shares)
    )
    grouped = tuple(holding for holding in contents.held if holding.constraints.groups)
    return _Node(
        version,
        zlib.compress(encode_node(view_of(contents)), _LEVEL),
        settled,
        replace(contents, held=grouped) if grouped else None,
        contents.problem or "",
    )


def _by_container(holding: Holding, mtgpupods: Mapping[str, Raw]) -> Holding:
    """Return the holding; that of an MtgpuPod with a share for each of its containers."""
    raw = mtgpupods.get(holding.uid) if holding.dialect == mtgpu.NAME else None
    return by_container(holding, read_pod(raw)) if raw is not None else holding


def _problem_of(gpu_pod: GpuPod, holding: Holding | None) -> str:
    """Return why the cards of a bound pod are not known, or "". The words are those of `mgpu.presentation.overview`."""
    if gpu_pod.request is None:
        return str(BadObject(gpu_pod.problems))
    if gpu_pod.finding is not None:
        return gpu_pod.finding.message
    try:
        shares = recorded_shares(gpu_pod)
    except BadObject as error:
        return str(error)
    if shares is not None or (holding is not None and _is_given(holding)):
        return ""
    return _problem_without_record(gpu_pod, gpu_pod.request, holding)


def _problem_without_record(gpu_pod: GpuPod, request: GpuRequest, holding: Holding | None) -> str:
    if not dialects.has_run(gpu_pod.pod, request):
        return NO_RECORD
    if holding is None:
        return NO_RECORD if dialects.has_waiting_container(gpu_pod.pod, request) else BARE
    return (UNRECORDED if holding.shares else BARE) if holding.bound else NO_RECORD


def _is_given(holding: Holding) -> bool:
    """Return whether the node itself has reported the cards of the holding."""
    return holding.dialect == nvidia_plugin.NVIDIA and all(share.card is not None for share in holding.shares)
