"""A state machine: claims and pods get cards, claims are moved and deleted, and the agent dies between any two steps.

Whatever the order, the kubelet's view decides what is delivered: a claim for which it has got an answer, until it has
the claim unprepared; and a pod that was granted a start.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deviceplugin.pods.capacity_check import holding
from deviceplugin.pods.identity import Refused
from mgpu.model.claim_object import read_claim
from mgpu.model.ledger import Holding
from mgpu.model.resource_claims import claim_holding
from tests.deviceplugin.dra.claims import allocation, claim, claim_pod, request, result, uid_of
from tests.deviceplugin.dra.rig import ClaimNode
from tests.deviceplugin.records import decided, started
from tests.examples import examples

Json = dict[str, Any]
CARDS = st.integers(0, 1)
WHICH = st.integers(0, 5)
CORES = st.sampled_from([20, 40, 60, 100])


class Crash(BaseException):
    """The agent dies."""


class ClaimMachine(RuleBasedStateMachine):
    """The node, and what the kubelet knows.

    Attributes:
        answered: By name, what each claim held when the kubelet got its answer.
        admitted: The names of the claims that the kubelet has in its state file.
        granted: By UID, the pods without claims whose containers run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="m")
        self.node = ClaimNode(Path(self.folder.name))
        self.numbers = itertools.count()
        self.answered: dict[str, Holding] = {}
        self.admitted: set[str] = set()
        self.granted: dict[str, Json] = {}
        self.names: list[str] = []
        self.countdown = -1
        self.node.step = self.step
        self.node.api.before_write = self.step
        self.node.api.after_write = self.step

    def teardown(self) -> None:
        self.folder.cleanup()

    def step(self) -> None:
        """Die when the countdown ends."""
        self.countdown -= 1
        if self.countdown == 0:
            raise Crash

    def crashing(self, after: int, call: Callable[[], None]) -> None:
        """Call a function. Let the agent die at the step with this number, if there is one, and start again."""
        self.countdown = after
        try:
            call()
        except Crash:
            self.countdown = -1
            self.node.restart()
        finally:
            self.countdown = -1

    # Hypothesis disables some rules in each example, so few rules with several actions reach more states than many.

    @rule(card=CARDS, cores=CORES, more=st.none() | CORES)
    def add_claim(self, card: int, cores: int, more: int | None) -> None:
        """Add a claim of one request or two, with a pod that uses it."""
        name = f"c{next(self.numbers)}"
        asked = [request("x", cores, "8Gi"), *([request("y", more, "8Gi")] if more is not None else [])]
        places = [card, 1 - card][: len(asked)]
        self.node.api.put(claim(name, *asked, cards=places, pods=[f"p-{name}"], owner=f"p-{name}"))
        self.node.take(claim_pod(f"p-{name}", claims=[name]))
        self.names.append(name)

    @precondition(lambda self: self.names)
    @rule(which=WHICH, ends=st.integers(0, 2), crash=st.integers(0, 14))
    def call_of_the_kubelet(self, which: int, ends: int, crash: int) -> None:
        name = self.names[which % len(self.names)]
        if ends == 0 or ("default", name) not in self.node.api.objects:
            self.unprepare(name, crash)
        else:
            self.prepare(name, crash)

    @precondition(lambda self: self.names)
    @rule(which=WHICH, kind=st.sampled_from(["repair", "repair during prepare", "delete"]), card=CARDS)
    def change_of_a_claim(self, which: int, kind: str, card: int) -> None:
        name = self.names[which % len(self.names)]
        if ("default", name) not in self.node.api.objects:
            return
        if kind == "delete":
            # Containers may still run until the kubelet has the claim unprepared.
            self.node.api.remove(name)
            self.node.drop(claim_pod(f"p-{name}", claims=[name]))
        elif kind == "repair" or name in self.answered:
            assert self.move(name, card) != self.node.api.is_prepared(name)
        else:
            self.repair_during_prepare(name, card)

    @rule(card=CARDS, core=CORES, ends=st.booleans())
    def pod_without_a_claim(self, card: int, core: int, *, ends: bool) -> None:
        if ends and self.granted:
            uid = min(self.granted)
            self.node.drop(self.granted.pop(uid))
        else:
            self.start_pod(f"q{next(self.numbers)}", card, core)

    @rule(is_reboot=st.booleans())
    def end_of_the_agent(self, *, is_reboot: bool) -> None:
        """The agent starts again. After a reboot the CDI folder is empty."""
        for file in (self.node.folder / "cdi").glob("*") if is_reboot else ():
            file.unlink()
        self.node.restart()

    def prepare(self, name: str, crash: int) -> None:
        """The kubelet has a claim prepared. It records the claim before it calls, and repeats failed calls."""
        self.admitted.add(name)

        def call() -> None:
            try:
                record = self.node.prepare(name, seconds=0)
            except Refused:
                return
            held = claim_holding(read_claim(self.node.api.named(name)))
            assert held is not None
            assert record.delivered
            assert {device.card for device in record.devices} == {f"GPU-n1-{share.card}" for share in held.shares}
            self.answered[name] = held

        self.crashing(crash, call)

    def unprepare(self, name: str, crash: int) -> None:
        """All containers that use the claim have ended."""
        if name not in self.admitted:
            return

        def call() -> None:
            self.node.unprepare(name)
            self.admitted.discard(name)

        self.answered.pop(name, None)
        self.crashing(crash, call)

    def move(self, name: str, card: int) -> bool:
        """Move a claim as the scheduler does, if it is not prepared."""

        def change(raw: Json) -> None:
            asked = raw["spec"]["devices"]["requests"]
            places = [card, 1 - card]
            raw["status"]["allocation"] = allocation([result(n, r) for r, n in zip(asked, places, strict=False)])

        return self.node.api.move(name, change)

    def repair_during_prepare(self, name: str, card: int) -> None:
        def interrupt() -> None:
            self.node.api.before_write = self.step
            self.move(name, card)

        self.node.api.before_write = interrupt
        try:
            self.prepare(name, 0)
        finally:
            self.node.api.before_write = self.step

    def start_pod(self, name: str, card: int, core: int) -> None:
        """A pod without a claim starts if the agent grants it."""
        node = self.node
        raw = decided(name, str(card), core)
        node.take(raw)
        gpu_pod = node.pods.by_uid(f"uid-{name}")
        assert gpu_pod is not None
        if node.grants.refusal(gpu_pod, node.pods.all(), node.cards, node.claims.holdings()) is None:
            node.grants.grant(gpu_pod, node.cards)
            self.granted[f"uid-{name}"] = started(raw)
            node.take(started(raw))
        else:
            node.drop(raw)

    def delivered(self) -> list[Holding]:
        held = [
            holding(gpu_pod, self.node.cards) for gpu_pod in self.node.pods.all() if gpu_pod.pod.uid in self.granted
        ]
        return [*held, *self.answered.values()]

    @invariant()
    def no_card_holds_more_than_it_has(self) -> None:
        for card in self.node.cards:
            uses = [held.uses(card) for held in self.delivered()]
            assert sum(use.core for use in uses) <= card.core
            assert sum(use.memory for use in uses) <= card.memory

    @invariant()
    def what_was_delivered_counts(self) -> None:
        counted = {held.uid: held for held in self.node.claims.holdings()}
        for name, held in self.answered.items():
            assert uid_of(name) in counted
            for card in self.node.cards:
                assert counted[uid_of(name)].uses(card).core >= held.uses(card).core

    @invariant()
    def what_was_delivered_is_not_moved(self) -> None:
        """The condition of the claim forbids it."""
        for name in self.answered:
            assert ("default", name) not in self.node.api.objects or self.node.api.is_prepared(name)

    @invariant()
    def what_was_delivered_has_its_files(self) -> None:
        files = self.node.record_files()
        assert files == {record.uid for record in self.node.claims.all()}
        for name in self.answered:
            record = self.node.claims.get(uid_of(name))
            assert record is not None
            assert record.delivered
            assert self.node.spec(name) == record.spec

    @invariant()
    def only_claims_that_the_kubelet_knows_have_records(self) -> None:
        assert self.node.record_files() <= {uid_of(name) for name in self.admitted}


TestClaims = ClaimMachine.TestCase
TestClaims.settings = examples(150, steps=30)
