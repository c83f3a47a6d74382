"""The claims that hold cards of this node, because they are being prepared or were delivered.

A claim counts from the moment it is reserved until the kubelet has it unprepared, which it does only after all
containers that use the claim have ended, also if their pods were deleted by force. Pods without claims may not start on
what claims hold (`allocation.allocator`), and claims are not prepared on what pods hold (`claim_preparation`).

The record of a claim is written before its CDI spec, and removed after it. So whenever the agent dies, every CDI spec
that a container can use has a record, and a record without a spec gets one again in `recover`: the folder of the specs
is empty after a reboot.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import orjson

from deviceplugin.dra.claim_cdi import ClaimCdiFiles, environments_in
from deviceplugin.dra.claim_records import ClaimRecord, ClaimRecords
from deviceplugin.dra.claim_views import view_in
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from mgpu.model.mig import Instance
from mgpu.model.resource_claims import DRIVER
from mgpu.settings import DevicePluginSettings

log = logging.getLogger(__name__)


RECORDS = "claims"
"""The name of the folder of the records in the driver's folder."""


def plugin_folder(kubelet_dir: Path) -> Path:
    """Return the folder of the driver's files, which the agent owns."""
    return kubelet_dir / "plugins" / DRIVER


def make_prepared_claims(
    settings: DevicePluginSettings, changed: Callable[[], None], gpus: Callable[[], tuple[Card, ...]]
) -> "PreparedClaims":
    records = ClaimRecords(plugin_folder(Path(settings.kubelet_dir)) / RECORDS)
    return PreparedClaims(settings.node, records, ClaimCdiFiles(Path(settings.cdi_dir)), changed, gpus)


class PreparedClaims:
    """The prepared claims. Use it on one event loop; any thread may call the methods that only read.

    No method awaits, so no other coroutine runs between a check of the capacity and `reserve`.

    Args:
        changed: A function that is called after every change of what claims hold.
        gpus: A function that returns all GPUs of the node.

    Attributes:
        removed: A counter that is incremented whenever a claim has been removed.
    """

    def __init__(
        self,
        node: str,
        records: ClaimRecords,
        files: ClaimCdiFiles,
        changed: Callable[[], None],
        gpus: Callable[[], tuple[Card, ...]],
    ) -> None:
        self._node = node
        self._records = records
        self._files = files
        self._changed = changed
        self._gpus = gpus
        # Both are replaced, and never changed, so that other threads may read them.
        self._claims: Mapping[str, ClaimRecord] = {}
        self._by_name: Mapping[tuple[str, str], ClaimRecord] = {}
        self._preparing: Counter[str] = Counter()
        self.removed = 0

    def recover(self) -> None:
        """Read the records that earlier agents have written, and write the CDI specs that are missing."""
        self._store(self._records.read())
        for uid, record in self._claims.items():
            if not record.delivered:
                continue  # The kubelet has the claim prepared again, or unprepared.
            try:
                self._files.write(uid, record.spec)
            except OSError as error:
                log.warning("CDI file of claim %s not written: %s", record.key, error)
        self._files.keep_only(self._claims.keys())
        self._changed()

    def get(self, uid: str) -> ClaimRecord | None:
        return self._claims.get(uid)

    def all(self) -> tuple[ClaimRecord, ...]:
        """Return the records by namespace, name and UID."""
        return tuple(sorted(self._claims.values(), key=lambda one: (one.namespace, one.name, one.uid)))

    def named(self, namespace: str, name: str) -> ClaimRecord | None:
        """Return the record of the claim with this name; of several claims, that of the latest one."""
        return self._by_name.get((namespace, name))

    def uids(self) -> frozenset[str]:
        """Return the UIDs of the claims that hold cards, and of those for which a call of the kubelet is in progress.

        The other parts of the agent keep what they store for these claims.
        """
        return frozenset((*self._claims, *self._preparing))

    def is_active(self, uid: str) -> bool:
        """Return whether `uids` has this claim."""
        return uid in self._claims or uid in self._preparing

    def is_preparing(self, uid: str) -> bool:
        """Return whether a call of the kubelet for this claim is in progress."""
        return uid in self._preparing

    @contextmanager
    def preparing(self, uid: str) -> Iterator[None]:
        """Count the claim among `uids` while the context is active."""
        self._preparing[uid] += 1
        try:
            yield
        finally:
            self._preparing[uid] -= 1
            self._preparing = +self._preparing
            if uid not in self._claims:
                self.removed += 1
                self._changed()

    def holdings(self) -> tuple[Holding, ...]:
        """Return what the claims hold. Thread-safe."""
        gpus = self._gpus()
        return tuple(record.holding(self._node, gpus) for record in self.all() if record.shares or record.former)

    def environments(self) -> dict[tuple[str, str], Mapping[str, str]]:
        """Return the environments of the claims' views, by the UID of the claim and the name of the view."""
        return dict(self._environments())

    def _environments(self) -> Iterator[tuple[tuple[str, str], Mapping[str, str]]]:
        for uid, record in self._claims.items():
            for device, env in environments_in(record.spec):
                view = view_in(uid, device)
                if view is not None:
                    yield (uid, view), env

    def _store(self, claims: Mapping[str, ClaimRecord]) -> None:
        self._claims = claims
        self._by_name = {(record.namespace, record.name): record for record in claims.values()}

    def reserve(self, record: ClaimRecord) -> None:
        """Let the claim hold its cards, and write its record and its CDI spec. Raises OSError, and then holds nothing.

        A record that was delivered stays delivered.
        """
        before = self._claims.get(record.uid)
        if before is not None and before.delivered:
            record = replace(record, delivered=True)
        if record == before:
            self._files.write(record.uid, record.spec)
            return
        self._records.write(record)
        self._store({**self._claims, record.uid: record})
        try:
            self._files.write(record.uid, record.spec)
        except OSError:
            self.cancel(record)
            raise
        finally:
            self._changed()

    def deliver(self, uid: str) -> ClaimRecord | None:
        """Store that the kubelet may get the devices now. Return None if the claim is not reserved any more.

        Raises OSError.
        """
        record = self._claims.get(uid)
        if record is None or record.delivered:
            return record
        record = replace(record, delivered=True)
        self._records.write(record)
        self._store({**self._claims, uid: record})
        return record

    def rename_instance(self, uid: str, card: str, instance: Instance, uuid: str) -> None:
        """Store that a MIG instance of a claim was created again, so that its MIG device may have another UUID.

        Containers that start from now on get the new device. Raises OSError.

        Args:
            card: The UUID of the card.
        """
        record = self._claims.get(uid)
        index = next((gpu.index for gpu in self._gpus() if gpu.uuid == card), None)
        before = {
            device.card
            for device in (record.devices if record is not None else ())
            if (device.index, device.instance) == (index, str(instance)) and device.card != uuid
        }
        if record is None or not before:
            return
        text = orjson.dumps(record.spec).decode()
        for old in before:
            text = text.replace(old, uuid)
        devices = tuple(replace(one, card=uuid if one.card in before else one.card) for one in record.devices)
        renamed = replace(record, devices=devices, spec=orjson.loads(text))
        self._records.write(renamed)
        self._store({**self._claims, uid: renamed})
        self._files.write(uid, renamed.spec)
        log.warning("a MIG instance of claim %s was created again as %s", record.key, uuid)

    def cancel(self, record: ClaimRecord) -> None:
        """Remove a reservation that has not been delivered, unless another one has replaced it."""
        now = self._claims.get(record.uid)
        if now is not None and not now.delivered and now == record:
            try:
                self.remove(record.uid)
            except OSError as error:
                log.warning("the reservation of claim %s is not removed: %s", record.key, error)

    def remove(self, uid: str) -> None:
        """Remove the CDI spec and the record of a claim, if it has any. Raises OSError.

        The spec is removed even if there is no record, because an agent may have died in between.
        """
        self._files.remove(uid)
        self._records.remove(uid)
        if uid in self._claims:
            self._store({key: record for key, record in self._claims.items() if key != uid})
            self.removed += 1
            self._changed()
