"""MIG instances are created for claims and destroyed after them, whenever the agent dies, and no others are touched."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from deviceplugin.dra.claim_cdi import ClaimCdiFiles
from deviceplugin.dra.claim_records import ClaimRecord, ClaimRecords
from deviceplugin.dra.mig_instances import MigInstances
from deviceplugin.dra.mig_ownership import MigOwnership
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.event_loop import Wakeup
from deviceplugin.mig.mig_driver import MigCard, MigInstance, MigRefused
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Share
from mgpu.model.mig import Instance, invalid_reason, layout_of
from mgpu.model.slice_names import device_type
from tests.builders import card

T = TypeVar("T")
CARD = card(0)
LAYOUT = layout_of(CARD.model, CARD.memory)
TWO = Instance(4, "2g.20gb")
THREE = Instance(4, "3g.40gb")
ONE = Instance(0, "1g.10gb")


class Died(Exception):
    """The agent has died."""


class FakeMig:
    """A card in MIG mode.

    Attributes:
        step: Called before and after each change; it may raise.
    """

    def __init__(self) -> None:
        self.instances: dict[Instance, str] = {}
        self.busy: set[Instance] = set()
        self.on = True
        self.step: Callable[[], None] = lambda: None
        self._numbers = count()

    def read(self) -> tuple[MigCard, ...]:
        found = tuple(MigInstance(i, uuid, i in self.busy) for i, uuid in sorted(self.instances.items()))
        return (MigCard(CARD.uuid, True, self.on, self.on, LAYOUT, found if self.on else ()),)

    def create(self, uuid: str, instance: Instance) -> MigInstance:
        assert uuid == CARD.uuid
        assert LAYOUT is not None
        self.step()
        if instance not in self.instances:
            if invalid_reason(LAYOUT, [*self.instances, instance]):
                raise MigRefused("the card does not have enough free capacity")
            self.instances[instance] = f"MIG-{next(self._numbers)}"
        self.step()
        return MigInstance(instance, self.instances[instance], False)

    def destroy(self, uuid: str, instance: Instance) -> None:
        assert uuid == CARD.uuid
        assert instance not in self.busy
        self.step()
        self.instances.pop(instance, None)
        self.step()

    def set_mode(self, uuid: str, *, on: bool) -> str | None:
        raise AssertionError((uuid, on))


class Node:
    """The instances of a node whose agent can die: the files and the card stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mig = FakeMig()
        self.restart()

    def restart(self) -> None:
        records = ClaimRecords(self.folder / "claims")
        self.claims = PreparedClaims("n1", records, ClaimCdiFiles(self.folder / "cdi"), lambda: None, lambda: (CARD,))
        self.claims.recover()
        self.changed = Wakeup()
        self.found = MigInstances(MigOwnership(self.folder / "mig"), self.mig, self.claims, self.changed)
        self.found.recover()

    def ensure(self, claim: str, instance: Instance) -> str:
        with self.claims.preparing(claim):
            return asyncio.run(self.found.ensure(claim, CARD.uuid, instance))

    def prepare(self, claim: str, instance: Instance) -> str:
        """Create an instance and write the record, as the preparation does."""
        with self.claims.preparing(claim):
            uuid = asyncio.run(self.found.ensure(claim, CARD.uuid, instance))
            share = Share("gpu", f"{CARD.uuid}/{instance.start}", 1000, whole=True, type=device_type(instance.profile))
            self.claims.reserve(ClaimRecord(claim, "default", claim, shares=(share,)))
        return uuid

    def collect(self) -> None:
        asyncio.run(self.found.collect())

    def files(self) -> list[str]:
        return sorted(file.name for file in (self.folder / "mig").glob("*.json"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_instance_stays_while_its_claim_has_a_record(node: Node) -> None:
    uuid = node.prepare("a", TWO)
    node.collect()
    node.restart()
    node.collect()
    assert node.mig.instances == {TWO: uuid}
    assert node.ensure("a", TWO) == uuid
    node.claims.remove("a")
    node.collect()
    assert node.mig.instances == {}
    assert node.files() == []


def test_instance_is_destroyed_only_when_no_process_uses_it(node: Node) -> None:
    node.prepare("a", TWO)
    node.claims.remove("a")
    node.mig.busy.add(TWO)
    node.collect()
    assert TWO in node.mig.instances
    with pytest.raises(RetryLater, match="processes run on it"):
        node.ensure("b", THREE)
    node.mig.busy.clear()
    node.ensure("b", THREE)
    assert node.mig.instances.keys() == {THREE}


def test_place_of_another_claim_is_not_given_away(node: Node) -> None:
    node.prepare("a", TWO)
    with pytest.raises(RetryLater, match="another claim still has"):
        node.ensure("b", THREE)
    with pytest.raises(RetryLater, match="another claim still has"):
        node.ensure("b", TWO)
    node.prepare("b", ONE)
    assert node.mig.instances.keys() == {TWO, ONE}


def test_instance_of_an_allocation_that_was_replaced_makes_room_for_the_new_one(node: Node) -> None:
    node.ensure("a", TWO)
    node.prepare("a", THREE)
    assert node.mig.instances.keys() == {THREE}


def test_instances_of_others_are_never_changed(node: Node) -> None:
    node.mig.instances[TWO] = "MIG-foreign"
    node.collect()
    for instance in (TWO, THREE):
        with pytest.raises(RetryLater, match="which mgpu has not created for a claim"):
            node.ensure("a", instance)
    assert node.files() == []
    node.prepare("a", ONE)
    node.claims.remove("a")
    node.collect()
    assert node.mig.instances == {TWO: "MIG-foreign"}


def test_instance_is_created_again_after_a_reboot(node: Node) -> None:
    before = node.prepare("a", TWO)
    node.mig.instances.clear()
    node.restart()
    node.collect()
    after = node.prepare("a", TWO)
    assert node.mig.instances == {TWO: after}
    assert after != before


def test_card_that_is_not_in_mig_mode_yet_makes_the_claim_wait(node: Node) -> None:
    node.mig.on = False
    with pytest.raises(RetryLater, match="not in MIG mode yet"):
        node.ensure("a", TWO)
    assert node.files() == []


def test_file_of_a_claim_that_has_ended_is_removed_if_the_reboot_has_removed_the_instance(node: Node) -> None:
    node.prepare("a", TWO)
    node.claims.remove("a")
    node.mig.instances.clear()
    node.mig.on = False
    node.restart()
    node.collect()
    assert node.files() == []


def deaths() -> Iterator[Callable[[], None]]:
    """Yield steps that let the agent die at the first, the second, … change of the card."""
    for last in range(4):
        numbers = count()

        def step(last: int = last, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) == last:
                raise Died

        yield step


def _live(node: Node) -> None:
    node.prepare("a", TWO)
    node.claims.remove("a")
    node.collect()


@pytest.mark.parametrize("comes_back", [True, False])
def test_agent_may_die_at_any_step(tmp_path: Path, comes_back: bool) -> None:
    """The kubelet repeats its call for the claim, or the claim is gone. Nothing is lost and nothing is left over."""
    for number, step in enumerate(deaths()):
        node = Node(tmp_path / str(number))
        node.mig.step = step
        with pytest.raises(Died):
            _live(node)
        node.mig.step = lambda: None
        node.restart()
        if comes_back:
            uuid = node.prepare("a", TWO)
            node.collect()
            assert node.mig.instances == {TWO: uuid}
        node.claims.remove("a")
        node.collect()
        assert node.mig.instances == {}
        assert node.files() == []


def test_two_claims_at_the_same_time_do_not_both_get_a_place(node: Node) -> None:
    async def both() -> list[object]:
        calls: list[Awaitable[object]] = [node.found.ensure(claim, CARD.uuid, TWO) for claim in ("a", "b")]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with node.claims.preparing("a"), node.claims.preparing("b"):
        outcomes = asyncio.run(both())
    assert [type(outcome) for outcome in outcomes] == [str, RetryLater]


def test_agent_waits_for_a_call_in_progress_before_it_hands_over(node: Node) -> None:
    """The call was cancelled, and still creates its instance. The next agent must not take it for one of no claim."""
    begun = threading.Event()
    release = threading.Event()

    def step() -> None:
        begun.set()
        release.wait(10)

    async def hand_over() -> None:
        node.mig.step = step
        call = asyncio.create_task(node.found.ensure("a", CARD.uuid, TWO))
        await asyncio.to_thread(begun.wait)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        threading.Timer(0.05, release.set).start()
        await node.found.settle()

    with node.claims.preparing("a"):
        asyncio.run(hand_over())
    assert node.mig.instances.keys() == {TWO}
    node.mig.step = lambda: None
    node.restart()
    node.collect()
    assert node.mig.instances == {}


def test_places_of_instances_are_known_before_they_exist(node: Node) -> None:
    owned: list[object] = []
    node.mig.step = lambda: owned.append(node.found.owned())
    node.prepare("a", TWO)
    assert owned == [{(CARD.uuid, TWO)}] * 2
