"""A node on which anything happens in any order, its leader crashing between any two writes, against what must never
be: a GPUID on two cards, a card over its capacity or of two parties, a move, a turn that was skipped.
"""

from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Ledger, Share
from scheduler.engine import nvidia_plugin
from scheduler.mtgpupods.mtgpupod_status import TRUE
from scheduler.mtgpupods.node_plan import NodePlan, plan_node
from scheduler.mtgpupods.observed_node import ObservedNode, OwnedPod
from scheduler.mtgpupods.occupy_pods import CreateOccupyPod, OccupyPod
from tests.builders import GIB, card
from tests.examples import examples
from tests.scheduler.mtgpupods.scene import pool

GPUIDS = st.sampled_from("ab")
PICK = st.integers(0, 3)


class Node(RuleBasedStateMachine):
    """What the API has of it, and what its leader has in memory (`admitted`)."""

    def __init__(self) -> None:
        super().__init__()
        self.cards = {c.index: c for c in (card(0), card(1, gib=40), card(2))}
        self.numbers = count()
        self.pods: dict[str, MtgpuPod] = {}
        self.made: dict[str, OwnedPod] = {}
        self.occupies: dict[str, OccupyPod] = {}
        self.given: dict[str, int] = {}
        self.told: set[str] = set()
        self.others: dict[str, Holding] = {}
        self.admitted: dict[str, Holding] = {}
        self.once_bound: dict[str, str] = {}
        self.present, self.cordoned, self.stock = True, False, False

    @initialize(stock=st.booleans())
    def of_a_kind(self, *, stock: bool) -> None:
        self.stock = stock

    # What users do.

    @rule(gpuid=GPUIDS, request=st.sampled_from([0, 200, 500, 501, 1000]), gib=st.sampled_from([1, 30, 41, 80, 81]))
    def create(self, gpuid: str, request: int, gib: int) -> None:
        number = next(self.numbers)
        name = f"m{number:03}"
        created = f"2026-11-21T00:00:{number // 2:02}Z"
        self.pods[name] = MtgpuPod("default", name, name, "n1", gpuid, request, 1000, gib * GIB, created)

    @precondition(lambda self: self.pods)
    @rule(pick=PICK)
    def delete(self, pick: int) -> None:
        uid = self.one_of(self.pods, pick)
        self.pods[uid] = replace(self.pods[uid], deleting=True)

    @precondition(lambda self: self.made)
    @rule(pick=PICK, deleting=st.booleans(), phase=st.sampled_from(["Running", "Succeeded", "Failed"]))
    def pod_changes(self, pick: int, phase: str, *, deleting: bool) -> None:
        made = self.made[uid := self.one_of(self.made, pick)]
        phase = made.phase if made.ended else phase
        self.made[uid] = replace(made, phase=phase, deleting=deleting or made.deleting)

    @rule(core=st.sampled_from([100, 1000]))
    def pool_pod_comes(self, core: int) -> None:
        free = [s.card for s in self.ledger().cards("n1") if s.card.healthy and s.core_free >= core]
        if free and self.present:
            held = pool(free[0].index, f"p{next(self.numbers)}", core)
            self.others[held.uid] = held

    @rule(pick=PICK)
    def nvidia_pod_comes(self, pick: int) -> None:
        free = self.free_for_nvidia("", "")
        if self.stock and free and self.present:
            held, got = pool(None, f"w{next(self.numbers)}", dialect="nvidia"), free[pick % len(free)]
            self.others[held.uid] = replace(held, shares=(Share("c", got.uuid, whole=True),))

    @precondition(lambda self: self.others)
    @rule(pick=PICK)
    def other_goes(self, pick: int) -> None:
        del self.others[self.one_of(self.others, pick)]

    @precondition(lambda self: self.pods)
    @rule(pick=PICK)
    def status_is_lost(self, pick: int) -> None:
        """As after a restore from a backup. Its Pod, where there is one, still tells the card."""
        uid = self.one_of(self.pods, pick)
        self.pods[uid] = replace(self.pods[uid], card_uuid="", phase="Pending")
        if uid not in self.made:
            self.once_bound.pop(uid, None)

    # What the node and its kubelet do.

    @rule(cordoned=st.booleans(), present=st.sampled_from([True, True, False]))
    def node_changes(self, *, cordoned: bool, present: bool) -> None:
        self.present, self.cordoned = present, cordoned

    @rule(index=st.sampled_from([0, 1]), healthy=st.booleans())
    def card_changes(self, index: int, *, healthy: bool) -> None:
        self.cards[index] = replace(self.cards[index], healthy=healthy)

    @precondition(lambda self: self.occupies and self.present)
    @rule(gpuid=GPUIDS, pick=PICK)
    def occupy_pod_gets_a_card(self, gpuid: str, pick: int) -> None:
        occupy = self.occupies.get(gpuid)
        if occupy is None or not occupy.alive or gpuid in self.given:
            return
        if self.stock:
            free = self.free_for_nvidia(occupy.uid, gpuid)
        else:
            free = [s.card for s in self.ledger().states_for_gpuid("n1", gpuid) if s.idle and s.card.healthy]
            self.told |= {gpuid} if free else set()
        if free:
            self.given[gpuid] = free[pick % len(free) if self.stock else 0].index

    @rule(gpuid=GPUIDS)
    def node_tells_the_card(self, gpuid: str) -> None:
        if gpuid in self.given:
            self.told.add(gpuid)

    @rule(gpuid=GPUIDS, phase=st.sampled_from(["Running", "Running", "Failed"]))
    def occupy_pod_runs(self, gpuid: str, phase: str) -> None:
        if gpuid in self.given:
            self.occupies[gpuid] = replace(self.occupies[gpuid], phase=phase)

    @rule(gpuid=GPUIDS, gone=st.booleans())
    def occupy_pod_is_deleted(self, gpuid: str, *, gone: bool) -> None:
        if gpuid in self.occupies:
            self.occupies[gpuid] = replace(self.occupies[gpuid], deleting=True)
            if gone:
                self.drop_occupy(gpuid)

    @rule()
    def what_is_deleted_goes(self) -> None:
        self.made = {uid: made for uid, made in self.made.items() if not made.deleting}
        for gpuid in [gpuid for gpuid, occupy in self.occupies.items() if occupy.deleting]:
            self.drop_occupy(gpuid)

    @rule()
    def all_goes_well(self) -> None:
        """For a while: so that there is something that can go wrong."""
        for _ in range(2):
            self.reconcile(None)
            for gpuid in sorted(self.occupies) if self.present else ():
                self.occupy_pod_gets_a_card(gpuid, 0)
                self.node_tells_the_card(gpuid)
                self.occupy_pod_runs(gpuid, "Running")

    # What the leader does.

    @rule(steps=st.one_of(st.none(), st.integers(0, 6)))
    def reconcile(self, steps: int | None) -> None:
        """steps: so many writes, then it crashes and another one leads, with nothing in memory."""
        found = plan_node(self.seen())
        self.check(found)
        self.admitted = {held.uid: held for held in found.reservations}
        for step, write in enumerate(self.writes(found)):
            if step == steps:
                break
            write()
        if steps is not None:
            self.admitted = {}

    def writes(self, found: NodePlan) -> list[Any]:
        verdicts = [(uid, desired) for uid, desired in found.desired.items()]
        bind = [lambda uid=u, to=v.bind: self.bind(uid, to) for u, v in verdicts if v.bind]
        ended = [lambda uid=u: self.mirror(uid) for u in found.desired]
        make = [lambda uid=u, on=v.card: self.make(uid, on) for u, v in verdicts if v.create_pod]
        going = [lambda uid=u, force=v.force: self.delete_pod(uid, force=force) for u, v in verdicts if v.delete_pod]
        finish = [lambda uid=u: self.finish(uid) for u, v in verdicts if v.remove_finalizer]
        occupy = [lambda step=s: self.occupy(step) for s in found.occupy_pod_steps]
        return [*bind, *ended, *make, *going, *finish, *occupy]

    def bind(self, uid: str, to: str) -> None:
        self.pods[uid] = replace(self.pods[uid], card_uuid=to)
        self.mirror(uid)
        self.admitted.pop(uid, None)
        assert self.once_bound.setdefault(uid, to) == to, "moved"

    def mirror(self, uid: str) -> None:
        made = self.made.get(uid)
        if made:
            self.pods[uid] = replace(self.pods[uid], phase=made.phase)

    def make(self, uid: str, on: Card | None) -> None:
        assert on is not None
        assert on.uuid == self.pods[uid].card_uuid, "its Pod runs on another card"
        assert uid not in self.made, "two Pods of one MtgpuPod"
        assert not self.pods[uid].ended, "started again"
        occupy = self.occupies[self.pods[uid].gpuid]
        assert occupy.running, "its card is not kept"
        assert self.cards[self.given[self.pods[uid].gpuid]].uuid == on.uuid, "its occupy pod is elsewhere"
        self.made[uid] = OwnedPod(f"pod-{uid}", card=on.uuid)

    def delete_pod(self, uid: str, *, force: bool) -> None:
        self.made[uid] = replace(self.made[uid], deleting=True)
        if force:
            del self.made[uid]

    def finish(self, uid: str) -> None:
        assert uid not in self.made, "its Pod is orphaned"
        del self.pods[uid]

    def occupy(self, step: Any) -> None:
        if isinstance(step, CreateOccupyPod):
            self.occupies[step.gpuid] = OccupyPod(f"occupy-{step.gpuid}-{next(self.numbers)}")
        else:
            assert self.occupies[step.gpuid].uid == step.uid
            self.occupies[step.gpuid] = replace(self.occupies[step.gpuid], deleting=True)
            if step.force:
                self.drop_occupy(step.gpuid)

    # What must never be.

    def check(self, found: NodePlan) -> None:
        admitted = {held.uid: held for held in found.reservations}
        for uid in admitted.keys() - self.admitted.keys():
            pod = self.pods[uid]
            before = [p for p in self.pods.values() if p.gpuid == pod.gpuid and p.queue_key < pod.queue_key]
            for other in before:
                said = found.desired[other.uid].bound
                exceeded = said is not None and said.reason == "ResourceExceeded"
                size = next((c.memory for c in self.cards.values() if admitted[uid].is_known_on(c)), 0)
                assert not exceeded or other.memory > size, f"{uid} was served before {other.uid}"
        degraded = {
            self.pods[uid].gpuid for uid, v in found.desired.items() if v.degraded and v.degraded.status == TRUE
        }
        assert not degraded & {held.gpuid for held in admitted.values()}, "joined what is degraded"
        seen = self.seen()
        turned = replace(seen, pods=seen.pods[::-1], held=seen.held[::-1], cards=seen.cards[::-1])
        assert plan_node(turned) == found
        held = tuple(h for h in seen.held if h.uid not in self.admitted)
        bound = [uid for uid, pod in self.pods.items() if pod.card_uuid]
        afresh = plan_node(replace(seen, held=held, reservations={}))
        assert {uid: afresh.desired[uid] for uid in bound} == {uid: found.desired[uid] for uid in bound}

    @invariant()
    def cards_are_nobody_elses(self) -> None:
        users = [*filter(None, (self.holding(pod) for pod in self.pods.values())), *self.admitted.values()]
        for c in self.cards.values():
            on = [held for held in users if held.is_known_on(c)]
            assert len({held.gpuid for held in on}) <= 1, "two GPUIDs on one card"
            assert sum(held.shares[0].core for held in on) <= c.core, "over the card's core"
            assert sum(held.shares[0].memory for held in on) <= c.memory, "over the card's memory"
            if on:
                assert not [held for held in self.others.values() if held.is_known_on(c)], "shared with others"
        for gpuid in "ab":
            its = {held.shares[0].card for held in users if held.gpuid == gpuid}
            assert len(its) <= 1, "one GPUID on two cards"

    def teardown(self) -> None:
        """When nothing is in the way, everybody who fits runs. Everything is deleted: nothing is left."""
        if not self.stock:
            self.settle()
        self.pods = {uid: replace(pod, deleting=True) for uid, pod in self.pods.items()}
        for _ in range(3):
            self.reconcile(None)
            self.what_is_deleted_goes()
        assert (self.pods, self.made, self.occupies, self.admitted) == ({}, {}, {}, {})

    def settle(self) -> None:
        self.present, self.cordoned, self.others = True, False, {}
        self.cards = {index: replace(c, healthy=True) for index, c in self.cards.items()}
        for _ in range(4):
            self.what_is_deleted_goes()
            self.all_goes_well()
        verdicts = plan_node(self.seen()).desired
        for gpuid in "ab":
            waiting = [p for p in self.pods.values() if p.gpuid == gpuid and not (p.card_uuid or p.ended or p.deleting)]
            states = [s for s in self.ledger().cards("n1") if s.gpuid == gpuid]
            states = states or [s for s in self.ledger().cards("n1") if s.idle]
            for pod in waiting:
                said = verdicts[pod.uid].bound
                assert said is not None
                assert said.reason == "ResourceExceeded"
            large = [
                p for p in sorted(waiting, key=lambda p: p.queue_key) if any(p.memory <= s.card.memory for s in states)
            ]
            for state in states if large else []:
                assert state.core_left < large[0].request or state.memory_left < large[0].memory
        for pod in self.pods.values():
            assert not self.holding(pod) or pod.uid in self.made

    # The world, as State has it.

    def one_of(self, among: dict[str, Any], pick: int) -> str:
        return sorted(among)[pick % len(among)]

    def drop_occupy(self, gpuid: str) -> None:
        del self.occupies[gpuid]
        self.given.pop(gpuid, None)
        self.told.discard(gpuid)

    def holding(self, pod: MtgpuPod) -> Holding | None:
        made = self.made.get(pod.uid)
        if made and not made.ended:
            return mtgpu.holding(pod, made.card)
        return mtgpu.holding(pod, pod.card_uuid) if pod.card_uuid and not pod.ended else None

    def kept(self) -> list[Holding]:
        found = []
        for gpuid, index in self.given.items():
            occupy = self.occupies[gpuid]
            told = self.cards[index].uuid if gpuid in self.told else None
            shares = (Share("occupy", told, whole=True),)
            name, dialect = mtgpu.occupy_name("n1", gpuid), "nvidia" if self.stock else "koordinator"
            if not occupy.ended:
                held = Holding(occupy.uid, "kube-system", name, "n1", dialect, shares, gpuid=gpuid, occupies=True)
                found.append(held)
        return found

    def seen(self) -> ObservedNode:
        users = filter(None, (self.holding(pod) for pod in self.pods.values()))
        held = (*users, *self.admitted.values(), *self.kept(), *self.others.values())
        occupies = {
            gpuid: replace(occupy, card=self.cards[self.given[gpuid]].uuid if gpuid in self.told else None)
            for gpuid, occupy in self.occupies.items()
        }
        return ObservedNode(
            "n1",
            tuple(self.pods.values()),
            tuple(self.cards.values()) if self.present else (),
            held,
            exists=self.present,
            unschedulable=self.cordoned,
            nvidia_plugin=self.stock,
            owned_pods=dict(self.made),
            occupy_pods=occupies,
            reservations=dict(self.admitted),
        )

    def ledger(self) -> Ledger:
        ledger, seen = Ledger(), self.seen()
        ledger.set_cards("n1", seen.cards)
        for held in seen.held:
            ledger.hold(held)
        return ledger

    def free_for_nvidia(self, uid: str, gpuid: str) -> list[Card]:
        """The cards that NVIDIA's plugin could give out; none where mgpu does not let the pod come."""
        if nvidia_plugin.indexes_used_by_mgpu(self.ledger(), "n1", uid, gpuid):
            return []
        taken = {i for g, i in self.given.items() if not self.occupies[g].ended}
        gone = [held for held in self.others.values() if held.dialect == "nvidia"]
        return [
            c
            for i, c in self.cards.items()
            if c.healthy and i not in taken and not any(held.is_known_on(c) for held in gone)
        ]


TestNode = Node.TestCase
TestNode.settings = examples(16, steps=40)
