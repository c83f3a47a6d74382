"""Creates the MIG instances that claims have, and destroys them when no claim has them any more.

`claim_preparation` calls `ensure` for each instance of a claim before it writes the claim's record, and `collect`
destroys what no claim has. `restore` creates again what a claim has lost, because its card was reset or somebody has
destroyed the instance. The kubelet does not call for that: it only starts the containers again. An instance is *wanted*
while the record of its claim contains it, or while a call for its claim is in progress. What happens if the agent dies:

- After the file of the instance was written (`mig_ownership`), and before the instance or the record exists: the
  kubelet repeats its call, and `ensure` creates the instance. If it does not, because the claim is gone, nothing wants
  the instance, and `collect` removes the file.
- After the instance was created, also if its compute instance is missing, and before the record exists: the same.
  `MigDriver.create` completes an instance that exists.
- After the record was removed, and before the instance was destroyed: nothing wants it, and `collect` destroys it.
- After it was destroyed, and before the file was removed: `collect` finds no instance, and removes the file.

Two claims never get the same place: all changes happen under one lock, and a place with a file of another claim is
given away only after its instance was destroyed. An instance on which processes run is not destroyed; NVML would refuse
it. Instances that somebody else has created are never changed, and a claim for their place waits.

A call of NVML may hang in the driver, so all of them run on one thread that does not keep the process from ending. The
agent waits a little for a call in progress before it hands the node over (`settle`): if it created an instance after
the next agent had found none and had removed its file, the instance would belong to no claim.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from deviceplugin.dra.claim_records import ClaimRecord
from deviceplugin.dra.mig_ownership import MigOwnership, OwnedInstance
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.event_loop import Wakeup
from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused, existing_instances, usable_instances
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, invalid_reason
from mgpu.model.mig_devices import mig_device_at
from mgpu.model.slice_names import PLACES

log = logging.getLogger(__name__)

T = TypeVar("T")
_COLLECT_SECONDS = 5.0
"""The interval at which instances that could not be destroyed are tried again."""
_SETTLE_SECONDS = 2.0


class MigInstances:
    """The MIG instances of claims. Use it on one event loop.

    Args:
        changed: A signal that is sent when claims change.
    """

    def __init__(self, ownership: MigOwnership, driver: MigDriver, claims: PreparedClaims, changed: Wakeup) -> None:
        self._ownership = ownership
        self._driver = driver
        self._claims = claims
        self._changed = changed
        self._calls = _DriverThread()
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}

    def recover(self) -> None:
        """Read which instances earlier agents have created."""
        self._ownership.recover()

    async def run(self) -> None:
        """Destroy instances that no claim has, until cancelled. Call this after `PreparedClaims.recover`."""
        while True:
            await self.collect()
            await self.restore()
            await self._changed.wait(_COLLECT_SECONDS)

    async def collect(self) -> None:
        """Destroy the instances that no claim has. Those that cannot be destroyed now stay for the next call."""
        if all(map(self._is_wanted, self._ownership.all())):
            return
        async with self._lock:
            for own in self._ownership.all():
                if self._is_wanted(own):
                    continue
                try:
                    await self._destroy(own)
                except (RetryLater, MigRefused, OSError) as error:
                    log.info("the MIG instance %s is not destroyed yet: %s", own, error)

    async def restore(self) -> None:
        """Create the missing instances of delivered claims again. Those that cannot exist now wait for later."""
        delivered = [record for record in self._claims.all() if record.delivered]
        wanted = [(record.uid, *place) for record in delivered for place in sorted(places_in(record))]
        if not wanted:
            return
        async with self._lock:
            try:
                cards = {card.uuid: usable_instances(card) for card in await self._calls.run(self._driver.read)}
            except (RetryLater, MigRefused) as error:
                log.info("it is not known whether the MIG instances of claims exist: %s", error)
                return
            for claim, card, instance in wanted:
                own = OwnedInstance(card, instance.start, instance.profile, claim)
                is_missing = card in cards and instance not in cards[card]
                # A claim that was unprepared meanwhile has no record, and a call in progress creates them itself.
                if is_missing and self._has_record(own) and not self._claims.is_preparing(claim):
                    await self._create_again(own)

    async def _create_again(self, own: OwnedInstance) -> None:
        try:
            self._claims.rename_instance(own.claim, own.card, own.instance, await self._ensure(own))
        except (RetryLater, MigRefused, OSError) as error:
            log.info("the MIG instance %s of a claim is missing: %s", own, error, extra={"claim": own.claim})

    async def settle(self) -> None:
        """Wait until no call of the driver is in progress, but not for long."""
        await self._calls.wait(_SETTLE_SECONDS)

    def owned(self) -> frozenset[tuple[str, Instance]]:
        """Return the places at which the agent has created instances, each with the UUID of its card. Thread-safe."""
        return frozenset((own.card, own.instance) for own in self._ownership.all())

    async def ensure(self, claim: str, card: str, instance: Instance) -> str:
        """Create an instance of a claim if it does not exist, and return the UUID of its MIG device.

        Args:
            claim: The UID of the claim, for which `PreparedClaims.preparing` is active.
            card: The UUID of the card.

        Raises:
            RetryLater: The instance cannot exist now.
        """
        async with self._lock:
            try:
                return await self._ensure(OwnedInstance(card, instance.start, instance.profile, claim))
            except (MigRefused, OSError) as error:
                raise RetryLater(f"the MIG instance {instance} of {card} is not created: {error}") from error

    async def _ensure(self, own: OwnedInstance) -> str:
        card = await self._card(own.card)
        if card is None:
            raise RetryLater(f"card {own.card} does not answer queries about MIG")
        if not card.current or card.layout is None:
            raise RetryLater(f"card {own.card} is not in MIG mode yet")
        for other in self._ownership.all():
            if other != own and other.card == own.card and _overlap(card.layout, other.instance, own.instance):
                self._check_unwanted(other, own)
                await self._destroy(other)
        if own not in self._ownership.all():
            card = await self._card(own.card)
            foreign = existing_instances(card) if card is not None else frozenset()
            for one in sorted(foreign):
                if _overlap(card.layout if card is not None else None, one, own.instance):
                    raise RetryLater(f"card {own.card} has a {one}, which mgpu has not created for a claim")
            self._ownership.add(own)
        made = await self._calls.run(lambda: self._driver.create(own.card, own.instance))
        if not made.uuid:
            raise RetryLater(f"the MIG instance {own} is incomplete")
        log.info("MIG instance of a claim exists", extra={"claim": own.claim, "instance": str(own), "uuid": made.uuid})
        return made.uuid

    def _check_unwanted(self, other: OwnedInstance, own: OwnedInstance) -> None:
        """Raise RetryLater if another claim, or an allocation of the same claim that was delivered, has a place.

        A place of the same claim that is in no record comes from an allocation that was replaced before its delivery.
        """
        is_replaced = other.claim == own.claim and not self._has_record(other)
        if not is_replaced and self._is_wanted(other):
            raise RetryLater(f"the MIG instance {own} overlaps {other.instance}, which another claim still has")

    def _is_wanted(self, own: OwnedInstance) -> bool:
        return self._has_record(own) or self._claims.is_preparing(own.claim)

    def _has_record(self, own: OwnedInstance) -> bool:
        record = self._claims.get(own.claim)
        return record is not None and (own.card, own.instance) in places_in(record)

    async def _destroy(self, own: OwnedInstance) -> None:
        """Destroy an instance, if it exists, and forget it. Raises RetryLater, MigRefused and OSError."""
        card = await self._card(own.card)
        if card is None:
            raise RetryLater(f"card {own.card} does not answer queries about MIG")
        found = next((one for one in card.instances if one.instance == own.instance), None)
        if found is not None and found.busy:
            raise RetryLater("processes run on it")
        if found is not None:
            await self._calls.run(lambda: self._driver.destroy(own.card, own.instance))
            log.info("MIG instance of a claim destroyed", extra={"claim": own.claim, "instance": str(own)})
        self._ownership.remove(own)

    async def _card(self, uuid: str) -> MigCard | None:
        cards = await self._calls.run(self._driver.read)
        return next((card for card in cards if card.uuid == uuid and card.capable), None)

    @property
    def _lock(self) -> asyncio.Lock:
        # A lock belongs to the event loop on which it is used first.
        loop = asyncio.get_running_loop()
        if loop not in self._locks:
            self._locks = {loop: asyncio.Lock()}
        return self._locks[loop]


class _DriverThread:
    """A daemon thread on which the driver is called. One call runs at a time, because the driver locks anyway."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="MIG instances of claims", daemon=True)
            self._thread.start()
        answer: Future[T] = Future()

        def work() -> None:
            # A call that was cancelled before it began is left out. One that has begun always ends.
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001 (the caller gets it)
                answer.set_exception(error)

        self._calls.put(work)
        return await asyncio.wrap_future(answer)

    async def wait(self, seconds: float) -> None:
        """Wait until all calls have ended, at most for these seconds."""
        if self._thread is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.run(lambda: None), seconds)

    def _work(self) -> None:
        while True:
            self._calls.get()()


def places_in(record: ClaimRecord) -> frozenset[tuple[str, Instance]]:
    """Return the instances that a claim has, or had by an earlier allocation, each with the UUID of its card."""
    found = set()
    for share in (*record.shares, *record.former):
        card, _, start = share.card.rpartition("/") if isinstance(share.card, str) else ("", "", "")
        device = mig_device_at(share.type, int(start)) if card and start.isdecimal() and int(start) < PLACES else None
        if device is not None:
            found.add((card, device.instance))
    return frozenset(found)


def _overlap(layout: Layout | None, one: Instance, other: Instance) -> bool:
    """Return whether two instances cannot exist together on a card."""
    if one == other or layout is None or layout.profile(one.profile) is None:
        return True
    return invalid_reason(layout, [one, other]) is not None
