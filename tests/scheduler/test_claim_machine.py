"""Whatever happens in whatever order: what was delivered to containers stays theirs, no card is over its size by mgpu's
decisions, and allocations that were written without a decision are repaired as far as possible.

The machine has classic pods and ResourceClaims on the same cards. Its kube-scheduler is the worst that stale sums can
make of it: it allocates any card, whether that is free or not.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mgpu.kube import ApiError, Unreachable
from mgpu.model.claim_object import read_claim
from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.ledger import Holding, Share
from mgpu.model.pods import Node
from mgpu.model.resource_claims import Claim, card_index, claim_holding, claim_path, gpu_request
from scheduler.cluster.gpu_pods import recorded_shares
from tests import builders as b
from tests.clock import Clock
from tests.examples import machine_test
from tests.scheduler.claim_objects import (
    allocated,
    claim,
    device_class,
    prepared,
    request,
    result,
)
from tests.scheduler.fake import Replica, admitted, admitted_claims, claim_review, cluster, reader

NODES = {"n1": 3, "n2": 1}
CARDS = {node: b.cards(count, node=node) for node, count in NODES.items()}
Raw = dict[str, Any]
Shape = tuple[int, ...]
"""The cores of each device of a claim, in percent; 0 for a whole card. Equal numbers are one request for several."""

NAMES = ("c", "d", "e", "f")
numbers = st.integers(0, 3)
"""Which of the claims to which something can happen."""
pods = st.sampled_from(["p", "q"])
nodes = st.sampled_from(["n1", "n1", "n2"])
shapes = st.sampled_from([(20,), (60,), (60,), (60,), (0,), (30, 50), (40, 40)])
cores = st.sampled_from([20, 60, 60, 100])
wished = st.sampled_from([{}, {}, {}, {"mgpu.io/same-card-group": "pair"}, {"mgpu.io/spread-group": "web"}])
fates = st.sampled_from(["lands", "lands", "twice", "refused", "in flight", "outdated", "no answer", "dry run"])
kinds = st.sampled_from(["resourceclaims", "resourceclaims", "pods", "devices"])
steps = st.sampled_from(
    [
        "",
        "claims arrive",
        "all arrive",
        "delivery",
        "late delivery",
        "allocation",
        "foreign allocation",
        "deallocation",
        "deletion",
        "binding",
        "no answer",
        "outage",
        "crash",
    ]
)


interruptions = st.sampled_from(
    ["", "", "", "claims arrive", "all arrive", "allocation", "deallocation", "deletion", "binding"]
)
"""What other threads do while the leader decides."""


class _Crash(Exception):
    """The scheduler process ends before a write."""


@lru_cache(maxsize=4096)
def _read(text: bytes) -> tuple[Claim, Holding | None]:
    one = read_claim(orjson.loads(text))
    return one, claim_holding(one)


def read(raw: Raw) -> Claim:
    return _read(orjson.dumps(raw))[0]


def held(raw: Raw) -> Holding | None:
    """Return what a claim holds by its allocation."""
    return _read(orjson.dumps(raw))[1]


def written(raw: Raw) -> dict[int, int]:
    """Return the core in milli that a claim takes of each card of its node, read without mgpu's own functions."""
    found: dict[int, int] = defaultdict(int)
    allocation = (raw.get("status") or {}).get("allocation") or {"devices": {"results": []}}
    for row in allocation["devices"]["results"]:
        found[int(row["device"].removeprefix("card-"))] += 10 * int(row["consumedCapacity"]["cores"])
    return found


def used(shares: Iterable[Share], node: str) -> dict[int, int]:
    """Return the core in milli that the shares take of each card of a node."""
    found: dict[int, int] = defaultdict(int)
    for share in shares:
        for card in CARDS[node]:
            if share.is_on(card):
                found[card.index] += share.amount(card).core
    return found


class Machine(RuleBasedStateMachine):
    """The API server is the truth. The leader sees it late, and the agents deliver what they can."""

    def start(self) -> None:
        self.clock = Clock()
        self.known = reader()
        self.api = cluster(*NODES.items())
        self.api.put("deviceclasses", device_class())
        self.created = 0
        self.has_foreign = False
        self.history: list[Raw] = []  # All versions of all claims.
        self.allocations = 0
        self.stride = 1  # How far the cards are apart that one request gets.
        self.foreign: dict[str, int] = {}  # By shareID, the version of the claim that the write without webhook gave.
        self.expected: set[str] = set()  # The UIDs of the claims that nobody but a repair may deallocate.
        self.in_flight: dict[str, Callable[[], Raw]] = {}  # By UID.
        self.delivered: dict[str, tuple[str, tuple[Share, ...]]] = {}  # By UID, what containers have: the node, shares.
        self.seen: dict[str, Raw] = {}  # By name, the claims as the agents know them.
        self.unhealthy = False
        self.during: Callable[[], object] | None = None  # called once, between a search for cards and what follows
        self.deciding = ""  # The UID of the claim that kube-scheduler writes now.
        self.lead()

    def lead(self) -> None:
        """A fresh replica leads, after all writes that the last leader has admitted have arrived or failed."""
        self.land()
        self.api.watchers.clear()
        self.api.watchers.append(self.keep)
        self.leader = Replica(self.api, self.clock)
        decider: Any = self.leader.claim_decider
        decider.place = self.interrupted(decider.place)
        self.api.admit = admitted(self.leader)
        self.api.admit_claim = admitted_claims(self.leader)

    def interrupted(self, place: Callable[..., object]) -> Callable[..., object]:
        """Let other threads of the leader act before the cards that were found are reserved."""

        @wraps(place)
        def placed(*args: Any, **named: Any) -> object:
            found = place(*args, **named)
            during, self.during = self.during, None
            if during:
                during()
            return found

        return placed

    # Claims and pods

    def pick(self, number: int, condition: Callable[[Claim], bool]) -> str | None:
        """Return the name of one of the claims that fulfill the condition, or None if there is none."""
        names = [name for (_, name), raw in sorted(self.api.resourceclaims.items()) if condition(read(raw))]
        return names[number % len(names)] if names else None

    def claim_without_allocation(self, number: int, shape: Shape, annotations: dict[str, str]) -> str | None:
        """Return the name of a claim without allocation, which is created if there is none."""
        missing = [name for name in NAMES if ("default", name) not in self.api.resourceclaims]
        # kube-scheduler writes a claim again only after the answer to the last write.
        found = self.pick(number, lambda one: not one.allocated and not self.is_being_written(one.uid))
        if found is not None or not missing:
            return found
        self.create_claim(missing[0], shape, annotations)
        return missing[0]

    def is_being_written(self, uid: str) -> bool:
        return uid == self.deciding or uid in self.in_flight

    def keep(self, kind: str, what: str, raw: Raw) -> None:
        if kind == "resourceclaims" and what == "changed":
            self.history.append(raw)

    def create_claim(self, name: str, shape: Shape, annotations: dict[str, str]) -> None:
        annotations = {} if len(shape) > 1 or shape == (0,) else annotations
        requests = []
        for i, core in enumerate(dict.fromkeys(shape)):
            amounts = {"cores": core, "memory": "1Gi"} if core else {}
            requests.append(request(f"r{i}", count=shape.count(core), **amounts))
        self.created += 1
        created = f"2026-01-01T00:00:{self.created:02}Z"
        raw = claim(name, *requests, annotations=annotations, uid=f"{name}-{self.created}", created=created)
        self.api.put("resourceclaims", raw)

    def results(self, raw: Raw, node: str, first: int) -> list[Raw]:
        """Return a choice for a claim: as many cards as needed, from this card on, or this card alone."""
        found = []
        for one in read(raw).requests:
            for i in range(one.count):
                device = f"card-{(first + i * self.stride) % NODES[node]}"
                self.allocations += 1
                share_id = f"share-{self.allocations}"
                core = 1000 if one.core is None else one.core
                consumed = {"cores": str(core // 10), "memory": "80Gi" if one.whole else "1Gi"}
                found.append(result(device, one.name, node, share_id, **consumed))
        return found

    @rule(
        number=numbers,
        shape=shapes,
        annotations=wished,
        node=nodes,
        first=st.integers(0, 2),
        fate=fates,
        consumers=st.sampled_from([1, 1, 1, 2]),
        during=interruptions,
    )
    def kube_scheduler_allocates(
        self,
        number: int,
        shape: Shape,
        annotations: dict[str, str],
        node: str,
        first: int,
        fate: str = "lands",
        consumers: int = 1,
        during: str = "",
    ) -> None:
        name = self.claim_without_allocation(number, shape, annotations)
        if name is None:
            return
        raw = self.api.claim(name)
        uid = read(raw).uid
        reserved = self.leader.state.reservation(uid)
        outer, self.deciding = self.deciding, uid
        self.during = (lambda: self.meanwhile(during, number, node, first)) if during else None
        new = allocated(raw, *self.results(raw, node, first), pods=tuple(f"of-{name}-{i}" for i in range(consumers)))
        if fate == "outdated":
            new["metadata"]["resourceVersion"] = str(int(raw["metadata"]["resourceVersion"]) - 1)
        self.api.refuse_allocations = fate == "refused"
        self.api.lost_answers = int(fate == "no answer")
        path = f"{claim_path('default', name)}/status"
        with contextlib.suppress(ApiError, RetryLater, Unreachable):
            if fate == "twice":
                self.api.begin_replace(path, new)
            store = self.api.begin_replace(path, new, dry_run=fate == "dry run")
            if fate == "in flight":
                self.in_flight[uid] = store
            else:
                store()
        self.during = None
        self.deciding = outer
        assert fate != "dry run" or self.leader.state.reservation(uid) in (None, reserved)
        self.note_allocations()
        self.api.refuse_allocations = False
        self.api.lost_answers = 0

    @rule(number=numbers, which=st.integers(0, 9), node=nodes, first=st.integers(0, 2))
    def the_webhook_is_called_for_an_outdated_claim(self, number: int, which: int, node: str, first: int) -> None:
        """The cache of an API server is late. It calls again with the present claim, or refuses the write.

        No other client writes cards while a write is in flight. As for bindings, the last decision would count.
        """
        uids = sorted({raw["metadata"]["uid"] for raw in self.history if not self.is_being_written(read(raw).uid)})
        if not uids:
            return
        uid = uids[number % len(uids)]
        earlier = [raw for raw in self.history if raw["metadata"]["uid"] == uid and not read(raw).allocated]
        old = earlier[which % len(earlier)]
        with contextlib.suppress(RetryLater):
            admitted_claims(self.leader)(claim_review(allocated(old, *self.results(old, node, first)), old))
        if self.leader.state.claims.is_deleted(uid):
            assert uid not in {holding.uid for holding in self.leader.state.holdings()}

    def note_allocations(self) -> None:
        self.expected |= {read(raw).uid for raw in self.api.resourceclaims.values() if read(raw).allocated}

    @rule()
    def land(self) -> None:
        """The writes that were admitted arrive."""
        waiting = self.in_flight
        self.in_flight = {}
        for store in waiting.values():
            with contextlib.suppress(ApiError):
                store()
        self.note_allocations()

    @rule(number=numbers, shape=shapes, annotations=wished, node=nodes)
    def somebody_allocates_without_the_webhook(
        self, number: int, shape: Shape, annotations: dict[str, str], node: str
    ) -> None:
        """The first cards are chosen, so that several such allocations overlap."""
        admit = self.api.admit_claim
        self.api.admit_claim = None
        self.has_foreign = True
        before = self.allocations
        self.stride = 0
        self.kube_scheduler_allocates(number, shape, annotations, node, 0)
        self.foreign |= {f"share-{i}": self.api.version for i in range(before + 1, self.allocations + 1)}
        self.stride = 1
        self.api.admit_claim = admit

    @rule(number=numbers, is_deleted=st.booleans())
    def the_pod_of_a_claim_ends(self, number: int, is_deleted: bool) -> None:
        """The agent stops the delivery, and the claim is deallocated or deleted."""
        name = self.pick(number, lambda one: one.allocated or is_deleted)
        if name is None:
            return
        self.delivered.pop(read(self.api.claim(name)).uid, None)
        self.expected.discard(read(self.api.claim(name)).uid)
        if is_deleted:
            self.api.remove("resourceclaims", name)
        else:
            self.api.edit_claim(name, lambda raw: raw["status"].update(reservedFor=[]))
            self.api.edit_claim(name, lambda raw: raw.update(status={}))

    @rule(number=numbers)
    def somebody_edits_a_claim(self, number: int) -> None:
        name = self.pick(number, lambda one: one.allocated)
        if name is not None:
            self.api.edit_claim(name, lambda raw: raw["metadata"].update(labels={"a": str(self.api.version)}))

    @rule(name=pods, core=cores, annotations=wished, node=nodes, fate=st.sampled_from(["lands", "refused", "outage"]))
    def a_pod_is_bound(self, name: str, core: int, annotations: dict[str, str], node: str, fate: str) -> None:
        if ("default", name) not in self.api.pods:
            self.created += 1
            memory = None if core == 100 else 1024
            uid = f"{name}-{self.created}"
            self.api.put("pods", b.pod(name, b.container("c", core, memory), uid=uid, annotations=annotations))
        admit = self.api.admit
        self.api.refuse_bindings = fate == "refused"
        self.api.admit = None if fate == "outage" else admit
        with contextlib.suppress(ApiError, RetryLater):
            self.api.bind(name, node)
        self.api.refuse_bindings = False
        self.api.admit = admit

    @rule(name=pods)
    def a_pod_is_deleted(self, name: str) -> None:
        if ("default", name) in self.api.pods:
            self.delivered.pop(self.api.pod(name)["metadata"]["uid"], None)
            self.api.remove("pods", name)

    # The agents

    @rule()
    def agents_see_the_claims(self) -> None:
        self.seen = {name: raw for (_, name), raw in self.api.resourceclaims.items()}

    def fits_beside_delivered(self, node: str, shares: tuple[Share, ...], uid: str) -> bool:
        others = [share for other, (on, its) in self.delivered.items() if on == node and other != uid for share in its]
        before = used(others, node)
        now = used(shares, node)
        is_exclusive = all(not before[card] for card in now if any(s.whole and s.card == card for s in shares))
        return is_exclusive and all(before[card] + amount <= 1000 for card, amount in now.items())

    @rule(number=numbers, is_late=st.booleans())
    def an_agent_delivers_a_claim(self, number: int, is_late: bool) -> None:
        """It writes the condition before the containers get anything, for the claim as it knows it.

        is_late: Whether it has not seen the latest changes of the claims.
        """
        if not is_late:
            self.agents_see_the_claims()
        waiting = [
            name
            for name, raw in sorted(self.seen.items())
            if read(raw).results and not read(raw).repair and read(raw).uid not in self.delivered
        ]
        if waiting:
            self.deliver_claim(waiting[number % len(waiting)])

    def deliver_claim(self, name: str) -> None:
        raw = self.seen[name]
        holding = held(raw)
        assert holding is not None
        is_unhealthy = self.unhealthy and holding.node == "n1" and 0 in used(holding.shares, "n1")
        if is_unhealthy or not self.fits_beside_delivered(holding.node, holding.shares, holding.uid):
            return
        change = {
            "metadata": {"resourceVersion": read(raw).version, "uid": read(raw).uid},
            "status": {"devices": prepared(raw)["status"]["devices"]},
        }
        with contextlib.suppress(ApiError):
            self.seen[name] = self.api.patch(f"{claim_path('default', name)}/status", change)
            self.delivered[holding.uid] = (holding.node, holding.shares)

    @rule(name=pods)
    def an_agent_delivers_a_pod(self, name: str) -> None:
        if ("default", name) not in self.api.pods:
            return
        pod = self.known(self.api.pod(name))
        shares = recorded_shares(pod) if pod and pod.pod.node else None
        if pod and shares and self.fits_beside_delivered(pod.pod.node, shares, pod.pod.uid):
            self.delivered[pod.pod.uid] = (pod.pod.node, shares)

    @rule(is_unhealthy=st.booleans())
    def a_card_changes(self, is_unhealthy: bool) -> None:
        self.unhealthy = is_unhealthy
        device = write_device(Node("n1"), "", CARDS["n1"])
        device["spec"]["devices"][0]["health"] = not is_unhealthy
        self.api.put("devices", device)

    # The scheduler

    @rule(kind=kinds, count=st.integers(1, 3))
    def events_arrive(self, kind: str, count: int) -> None:
        self.leader.deliver(kind, count)

    @rule(what=st.sampled_from(["work", "wait", "another leads"]))
    def time_passes(self, what: str) -> None:
        if what == "wait":
            self.in_flight.clear()  # A write does not take as long as a reservation lasts.
            self.clock.now += 31
            self.leader.decider.check_overdue()
        elif what == "another leads":
            self.lead()
        self.leader.late.work()

    @precondition(lambda self: self.has_foreign)
    @rule(
        before=st.lists(steps, min_size=3, max_size=8)
        | st.builds(lambda i, s: [""] * i + [s], st.integers(0, 4), steps),
        during=interruptions,
        is_informed=st.booleans(),
        number=numbers,
        node=nodes,
        first=st.integers(0, 2),
    )
    def repair(self, before: list[str], during: str, is_informed: bool, number: int, node: str, first: int) -> None:
        """Two rounds of repairs, before each write of which something else happens."""
        remaining = iter(before)
        if is_informed:
            self.leader.deliver("resourceclaims")

        def step() -> None:
            self.the_ledger_covers_what_was_written()
            self.meanwhile(next(remaining, ""), number, node, first)
            self.api.between = step

        self.api.between = step
        self.during = (lambda: self.meanwhile(during, number, node, first)) if during else None
        try:
            self.leader.claim_repair.work()
            self.leader.claim_repair.work()
        except _Crash:
            self.api.between = None
            self.lead()
        self.api.between = None
        self.during = None
        self.api.lost_answers = 0

    def meanwhile(self, what: str, number: int, node: str, first: int) -> None:
        actions: dict[str, Callable[[], object]] = {
            "claims arrive": lambda: self.leader.deliver("resourceclaims"),
            "all arrive": lambda: self.leader.deliver(),
            "delivery": lambda: self.an_agent_delivers_a_claim(number, is_late=False),
            "late delivery": lambda: self.an_agent_delivers_a_claim(number, is_late=True),
            "allocation": lambda: self.kube_scheduler_allocates(number, (60,), {}, node, first),
            "foreign allocation": lambda: self.somebody_allocates_without_the_webhook(number, (60,), {}, node),
            "deallocation": lambda: self.the_pod_of_a_claim_ends(number, is_deleted=False),
            "deletion": lambda: self.the_pod_of_a_claim_ends(number, is_deleted=True),
            "binding": lambda: self.a_pod_is_bound("p", 60, {}, node, "lands"),
            "no answer": lambda: setattr(self.api, "lost_answers", 1),
        }
        if what == "outage":
            raise Unreachable("no answer")
        if what == "crash":
            raise _Crash
        if what:
            actions[what]()

    # What must hold

    def api_use(self, node: str) -> dict[int, int]:
        """Return the core in milli that the objects in the API server take of each card of a node."""
        found: dict[int, int] = defaultdict(int)
        for raw in self.api.resourceclaims.values():
            if read(raw).node == node:
                for card, core in written(raw).items():
                    found[card] += core
        for raw in self.api.pods.values():
            pod = self.known(raw)
            if pod is not None and pod.pod.node == node:
                for card, core in used(recorded_shares(pod) or (), node).items():
                    found[card] += core
        return found

    @invariant()
    def what_was_delivered_stays_allocated(self) -> None:
        for raw in self.api.resourceclaims.values():
            uid = read(raw).uid
            if uid in self.delivered:
                holding = held(raw)
                assert holding is not None, raw
                assert (holding.node, holding.shares) == self.delivered[uid]

    @invariant()
    def what_was_delivered_fits(self) -> None:
        for node in NODES:
            shares = [share for on, its in self.delivered.values() if on == node for share in its]
            assert all(core <= 1000 for core in used(shares, node).values())

    @invariant()
    def the_ledger_covers_what_was_written(self) -> None:
        """Except for allocations that bypassed the webhook and that the watch has not delivered."""
        counted = {holding.uid: holding for holding in self.leader.state.holdings()}
        for raw in self.api.resourceclaims.values():
            holding = held(raw)
            if holding is None or self.is_unknown(read(raw)):
                continue
            assert holding.uid in counted, raw
            assert counted[holding.uid].node == holding.node, raw
            taken = used(counted[holding.uid].shares, holding.node)
            assert all(taken[card] >= core for card, core in written(raw).items()), (raw, counted)

    def is_unknown(self, one: Claim) -> bool:
        version = self.foreign.get(one.results[0].share_id, 0)
        known = self.leader.state.claims.get(one.uid)
        return version > int(known.version if known else 0)

    @invariant()
    def no_card_is_over_its_size(self) -> None:
        """Except for cards with allocations that bypassed the webhook."""
        for node in NODES:
            beyond = self.cards_beyond_the_webhook(node)
            assert all(core <= 1000 or card in beyond for card, core in self.api_use(node).items())

    def cards_beyond_the_webhook(self, node: str) -> set[int | None]:
        results = [result for raw in self.api.resourceclaims.values() for result in read(raw).results]
        return {
            card_index(result.device) for result in results if result.pool == node and result.share_id in self.foreign
        }

    def teardown(self) -> None:
        if not hasattr(self, "leader"):
            return
        self.in_flight.clear()
        self.a_card_changes(is_unhealthy=False)
        self.clock.now += 100
        for _ in range(8):
            self.leader.deliver()
            self.leader.decider.check_overdue()
            self.leader.late.work()
            self.leader.claim_repair.work()
            for number in range(len(NAMES)):
                self.an_agent_delivers_a_claim(number, is_late=False)
            for name in ("p", "q"):
                self.an_agent_delivers_a_pod(name)
        self.leader.deliver()
        self.what_was_delivered_stays_allocated()
        self.what_was_delivered_fits()
        self.check_rest()

    def check_rest(self) -> None:
        state = self.leader.state
        assert all(holding.bound for holding in state.holdings())
        rebuilt = Replica(self.api, self.clock)
        assert state.holdings() == rebuilt.state.holdings()
        for node in NODES:
            assert state.node_snapshot(node, "").cards == rebuilt.state.node_snapshot(node, "").cards
        for raw in self.api.resourceclaims.values():
            one = read(raw)
            assert one.allocated or one.repair or one.uid not in self.expected, raw
            if one.repair:
                # Its place was taken while it had no allocation, and there is no other.
                assert not one.allocated
                self.check_does_not_fit(read({**raw, "status": orjson.loads(one.repair)}))
            elif one.results and one.uid not in self.delivered and len(one.consumers) == 1:
                self.check_does_not_fit(one)

    def check_does_not_fit(self, one: Claim) -> None:
        snapshot = self.leader.state.node_snapshot(one.node, one.uid)
        placed = self.leader.claim_decider.place(one, gpu_request(one), snapshot)
        assert isinstance(placed, Rejection), (one, placed)


class Cluster(Machine):
    """The webhook answers, until somebody allocates without it."""

    @initialize()
    def begin(self) -> None:
        self.start()


class AfterOutage(Machine):
    """The webhook did not answer for some time, so that claims overlap at the beginning."""

    @initialize(claims=st.lists(st.sampled_from([(60,), (60,), (40, 40), (0,), (30, 50)]), min_size=2, max_size=4))
    def begin(self, claims: list[Shape]) -> None:
        self.start()
        for shape in claims:
            self.somebody_allocates_without_the_webhook(0, shape, {}, "n1")
        self.leader.deliver()
        self.leader.claim_repair.work()


TestCluster = machine_test(Cluster, 250, steps=25)
TestAfterOutage = machine_test(AfterOutage, 250, steps=20)
