"""Pods of all vocabularies on the same cards, in any order of events: no card is over its size, whatever is counted,
and every dialect reads back exactly what it wrote.
"""

import contextlib
from collections import defaultdict
from typing import Any

import jsonpatch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mgpu.kube import ApiError
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.ledger import Share, shares_of
from mgpu.model.pods import Node
from scheduler.cluster.gpu_pods import read_gpu_pod, recorded_shares
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.clock import Clock
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, admitted
from tests.scheduler.vocabularies import GIB, SHAPES, Key, Use, held
from webhook.pod_mutation import mutate

NODES = {
    # Neither is the minor the index, nor are cards equal.
    "n1": (
        Card(0, "GPU-a", "A100", 80 * GIB, minor=1),
        Card(1, "GPU-b", "L40S", 46068 << 20, minor=0),
        Card(0, "mlx5_0", "", 0, minor=0, type="rdma"),
    ),
    "n2": (Card(0, "GPU-c", "A100", 80 * GIB, minor=0),),
}
MOST = 20
which = st.integers(0, MOST)
nodes = st.sampled_from(["n1", "n1", "n2"])
shapes = st.sampled_from(sorted(SHAPES))
fates = st.sampled_from(["lands", "lands", "lands", "refused", "dry run", "outage"])
kinds = st.sampled_from(["nodes", "devices", "pods", "pods", "pods"])


class Sides(RuleBasedStateMachine):
    """One API server, one scheduler process that may be replaced by a fresh one at any time."""

    @initialize()
    def begin(self) -> None:
        self.clock, self.api = Clock(), FakeApi()
        for name in NODES:
            self.put_node(name)
        self.created = 0
        self.shapes: dict[str, str] = {}
        self.decided: dict[str, list[Reservation]] = defaultdict(list)
        self.begin_replica()

    def put_node(self, name: str, *, healthy: bool = True) -> None:
        self.api.put("nodes", b.node(name))
        device = write_device(Node(name), "", NODES[name])
        device["spec"]["devices"][0]["health"] = healthy
        self.api.put("devices", device)

    def begin_replica(self) -> None:
        self.api.watchers.clear()
        self.replica = Replica(self.api, self.clock)
        decide = self.replica.decider.decide

        def remembered(*arguments: Any, **options: Any) -> Reservation | Rejection:
            decision = decide(*arguments, **options)
            if isinstance(decision, Reservation):
                self.decided[decision.uid].append(decision)
            return decision

        self.replica.decider.decide = remembered  # type: ignore[method-assign]
        self.api.admit = admitted(self.replica)

    def pod(self, shape: str, node: str = "") -> str:
        """The name of a new pod, as admission leaves it."""
        self.created += 1
        name = f"p{self.created}"
        raw = SHAPES[shape].pod(name, node=node)
        self.api.put("pods", jsonpatch.apply_patch(raw, [dict(step) for step in mutate(raw, SETTINGS).patch]))
        self.shapes[raw["metadata"]["uid"]] = shape
        return name

    @rule(burst=st.lists(shapes, min_size=1, max_size=5), node=nodes, fate=fates)
    def bind(self, burst: list[str], node: str, fate: str) -> None:
        for shape in burst[: MOST - len(self.api.pods)]:
            self.bind_one(self.pod(shape), node, fate)

    @rule(which=which, node=nodes, fate=fates)
    def bind_again(self, which: int, node: str, fate: str) -> None:
        waiting = [name for (_, name), raw in self.api.pods.items() if not raw["spec"].get("nodeName")]
        if waiting:
            self.bind_one(waiting[which % len(waiting)], node, fate)

    def bind_one(self, name: str, node: str, fate: str) -> None:
        admit = self.api.admit
        self.api.refuse_bindings = fate == "refused"
        if fate == "outage":
            self.api.admit = None
        with contextlib.suppress(ApiError, RetryLater):
            self.api.bind(name, node, dry_run=fate == "dry run")
        self.api.refuse_bindings, self.api.admit = False, admit

    @rule(shape=shapes, node=nodes)
    def create_with_a_node(self, shape: str, node: str) -> None:
        if len(self.api.pods) < MOST:
            self.pod(shape, node)

    @rule(which=which, what=st.sampled_from(["deleted", "ended", "starts", "starts"]))
    def a_pod_changes(self, which: int, what: str) -> None:
        if not self.api.pods:
            return
        _, name = list(self.api.pods)[which % len(self.api.pods)]
        raw = self.api.pod(name)
        if what == "deleted":
            self.api.remove("pods", name)
        elif what == "ended":
            self.api.edit_pod(name, lambda raw: raw["status"].update(phase="Succeeded"))
        elif raw["status"]["phase"] == "Pending" and held(raw, self.shape(raw), self.cards(raw)):
            self.api.edit_pod(name, lambda raw: raw["status"].update(phase="Running"))

    @rule(node=nodes, what=st.sampled_from(["unhealthy", "no device", "back", "back"]))
    def a_node_changes(self, node: str, what: str) -> None:
        if what != "no device":
            self.put_node(node, healthy=what == "back")
        elif node in self.api.devices:
            self.api.remove("devices", node)

    @rule(kind=kinds, count=st.integers(1, 3))
    def events_arrive(self, kind: str, count: int) -> None:
        self.replica.deliver(kind, count)

    @rule()
    def late_decisions_are_made(self) -> None:
        self.replica.late.work()

    @rule()
    def time_passes(self) -> None:
        self.clock.now += 31
        self.replica.decider.check_overdue()
        self.replica.late.work()

    @rule()
    def the_process_starts_again(self) -> None:
        self.begin_replica()
        for uid in self.replica.state.undecided_pods():
            self.replica.late.add(uid)

    @invariant()
    def no_card_is_over_its_size(self) -> None:
        total: dict[tuple[str, Key], list[Use]] = defaultdict(list)
        for raw in self.bound():
            for key, use in held(raw, self.shape(raw), self.cards(raw)).items():
                total[raw["spec"]["nodeName"], key].append(use)
        sizes = {(node, (card.type, card.index)): card.memory for node, cards in NODES.items() for card in cards}
        for where, uses in total.items():
            core, memory, ratio = (sum(amounts) for amounts in zip(*uses, strict=True))
            assert core <= 100, (where, uses)
            assert memory <= sizes[where], (where, uses)
            assert ratio <= 100, (where, uses)

    @invariant()
    def every_dialect_reads_back_what_it_wrote(self) -> None:
        for raw in self.bound():
            known, shape = read_gpu_pod(raw, SETTINGS), self.shape(raw)
            assert known is not None
            assert known.dialect == shape.vocabulary
            by_hand = held(raw, shape, self.cards(raw))
            shares = recorded_shares(known)
            assert (shares is None) == (not by_hand)
            if shares is None:
                continue
            uid = raw["metadata"]["uid"]
            assert any(
                self.uses(shares_of(d.request, d.placement), raw) == self.uses(shares, raw) for d in self.decided[uid]
            )
            assert {key for _, key in self.uses(shares, raw)} == set(by_hand)
            assert len(self.uses(shares, raw)) == shape.cards

    def uses(self, shares: tuple[Share, ...], raw: dict[str, Any]) -> dict[tuple[str, Key], object]:
        cards = self.cards(raw)
        return {(s.container, (c.type, c.index)): s.amount(c) for s in shares for c in cards if s.is_on(c)}

    def bound(self) -> list[dict[str, Any]]:
        return [
            raw
            for raw in self.api.pods.values()
            if raw["spec"].get("nodeName") and raw["status"]["phase"] not in ("Succeeded", "Failed")
        ]

    def shape(self, raw: dict[str, Any]) -> Any:
        return SHAPES[self.shapes[raw["metadata"]["uid"]]]

    def cards(self, raw: dict[str, Any]) -> tuple[Card, ...]:
        return NODES[raw["spec"].get("nodeName", "n1")]

    def teardown(self) -> None:
        """At rest, the ledger is what a process that starts now would have, and nothing is reserved."""
        for name in NODES:
            self.put_node(name)
        self.replica.settle()
        self.replica.deliver()
        rebuilt = Replica(self.api, self.clock)
        assert all(holding.bound for holding in self.replica.state.holdings())
        assert self.replica.state.holdings() == rebuilt.state.holdings()
        self.no_card_is_over_its_size()


TestSides = Sides.TestCase
TestSides.settings = examples(10)
