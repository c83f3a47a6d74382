"""The card source of real cards, which reads NVML (nvidia-ml-py, the `pynvml` module).

`deviceplugin.main` creates the source, and `cards.card_watch` reads it. The driver may be missing, and a card may stop
answering or be pulled out at any time, so every call may fail. A card is healthy only if NVML has just answered for it,
and if NVML has reported no error of the card for `QUIET_SECONDS`, except for errors that applications cause.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pynvml

from deviceplugin.mig.mig_nvml import NO_MIG
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.slice_names import MPS

log = logging.getLogger(__name__)

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs (error codes of NVIDIA's driver) that applications cause, and not the card (docs/design/koordinator.md)."""
QUIET_SECONDS = 60.0
"""A card that has reported an error is healthy again after this time without another error."""
RESTART_SECONDS = 30.0
"""The interval at which NVML is initialized again while a card is missing. A card that has come back does not answer
before NVML has been initialized again."""
_EVENT_WAIT_MS = 1000
_EVENT_WAITS = 5
"""The number of waits in one call of `NvmlCards.wait`. Each is short, so that the agent can stop between them."""


class Nvml(Protocol):
    """The part of the `pynvml` module that reads cards. Each function may raise pynvml.NVMLError."""

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> str: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetName(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMigMode(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: Any) -> None: ...  # noqa: N802
    def nvmlEventSetCreate(self) -> Any: ...  # noqa: N802
    def nvmlEventSetFree(self, events: Any) -> None: ...  # noqa: N802
    def nvmlEventSetWait(self, events: Any, milliseconds: int) -> Any: ...  # noqa: N802


@dataclass(frozen=True, slots=True)
class Host:
    """The folders of /proc and /sys in which the host's kernel lists cards.

    Attributes:
        gpus: The folder with an entry for each card of NVIDIA's driver.
        pci: The folder with an entry for each PCI device.
    """

    gpus: Path = Path("/proc/driver/nvidia/gpus")
    pci: Path = Path("/sys/bus/pci/devices")

    def pci_addresses(self) -> frozenset[str]:
        """Return the PCI addresses of the driver's cards; empty if the folder cannot be read."""
        try:
            return frozenset(entry.name for entry in self.gpus.iterdir())
        except OSError:
            return frozenset()

    def numa_node(self, bus_id: str) -> int | None:
        """Return the NUMA node of a PCI device, or None if the host does not report it.

        NVML writes the PCI domain at the start of the address with eight digits, and the kernel writes it with four.
        """
        domain, _, rest = bus_id.lower().partition(":")
        try:
            node = int((self.pci / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None


class NvmlCards:
    """The source of real cards.

    A card that stops answering is reported as unhealthy until it answers again. If mgpu does not partition the node's
    cards, a card in MIG mode is ignored; if it was reported before, it is reported as unhealthy. If the node's
    partitioning mode is MPS, a card in MIG mode is unhealthy until MIG mode has been switched off.

    Args:
        nvml: The `pynvml` module, or a fake.
        host: The host's lists of its cards; None for the default folders.
        clock: A monotonic clock in seconds.
        indexes: A function that returns, by UUID, the indexes that an earlier agent reported. It is called once.
        partition_mode: A function that returns the partitioning mode of the node, or "".
    """

    def __init__(
        self,
        nvml: Nvml = pynvml,
        host: Host | None = None,
        clock: Callable[[], float] = time.monotonic,
        indexes: Callable[[], Mapping[str, int]] = dict,
        partition_mode: Callable[[], str] = lambda: "",
    ) -> None:
        self._nvml = nvml
        self._host = host or Host()
        self._clock = clock
        self._partition_mode = partition_mode
        self._read_indexes = indexes
        self._indexes: Mapping[str, int] | None = None
        self._in_mig_mode: set[str] = set()
        self.driver = ""
        self._events: Any = None
        self._open = False
        self._pci_addresses: frozenset[str] = frozenset()
        self._cards: dict[str, Card] = {}
        self._errors: dict[str, float] = {}
        self._has_missing_cards = False
        self._started = 0.0

    def read(self) -> tuple[Card, ...]:
        try:
            if self._open and self._must_restart():
                self.close()
            if not self._open:
                self._start()
            if self._indexes is None:
                self._indexes = self._read_indexes()
            self._cards = self._enumerate()
        except pynvml.NVMLError as error:
            self.close()
            # Cards that were read before are kept as unhealthy cards, so that pods keep their shares of them.
            if not self._cards:
                raise RetryLater(f"NVML: {error}") from error
            log.warning("NVML does not answer any more: %s", error)
            self._cards = {uuid: replace(card, healthy=False) for uuid, card in self._cards.items()}
        return tuple(sorted(self._cards.values(), key=lambda card: card.index))

    def wait(self, stop: threading.Event) -> None:
        for _ in range(_EVENT_WAITS):
            if stop.is_set() or self._wait_for_event(stop):
                return

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                if self._events is not None:
                    self._nvml.nvmlEventSetFree(self._events)
                self._nvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.warning("NVML did not shut down: %s", error)
            self._events = None

    def _must_restart(self) -> bool:
        """Return whether NVML must be initialized again, so that it finds cards that were added or have come back."""
        if self._host.pci_addresses() != self._pci_addresses:
            return True
        return self._has_missing_cards and self._clock() - self._started >= RESTART_SECONDS

    def _start(self) -> None:
        present = self._host.pci_addresses()
        self._nvml.nvmlInit()
        self._open = True
        self._pci_addresses = present
        self._started = self._clock()
        self.driver = self._nvml.nvmlSystemGetDriverVersion()
        self._events = self._nvml.nvmlEventSetCreate()
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                kinds = self._nvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError
                self._nvml.nvmlDeviceRegisterEvents(handle, kinds, self._events)
            except pynvml.NVMLError as error:
                log.warning("card %d reports no health events: %s", index, error)

    def _enumerate(self) -> dict[str, Card]:
        found: dict[str, Card] = {}
        for position in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(position)
                uuid = self._nvml.nvmlDeviceGetUUID(handle)
                in_mig = self._in_mig(handle)
                mode = self._partition_mode() if in_mig else ""
                if not in_mig or mode:
                    self._in_mig_mode.discard(uuid)
                    card = self._card(handle, uuid, position, found)
                    found[uuid] = replace(card, healthy=card.healthy and mode != MPS)
                elif uuid not in self._in_mig_mode:
                    log.warning("ignoring card %s, which is in MIG mode", uuid)
                    self._in_mig_mode.add(uuid)
            except pynvml.NVMLError as error:
                log.warning("card %d does not answer: %s", position, error)
        missing = {uuid: replace(card, healthy=False) for uuid, card in self._cards.items() if uuid not in found}
        self._has_missing_cards = bool(missing.keys() - self._in_mig_mode)
        return found | missing

    def _in_mig(self, handle: Any) -> bool:
        """Return whether MIG mode is on. Cards and drivers without MIG answer with an error."""
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(handle)
        except pynvml.NVMLError as error:
            if error.value not in NO_MIG:
                raise
            return False
        return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)

    def _card(self, handle: Any, uuid: str, position: int, found: Mapping[str, Card]) -> Card:
        memory = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        healthy = self._clock() - self._errors.get(uuid, -math.inf) >= QUIET_SECONDS
        if uuid in self._cards:
            return replace(self._cards[uuid], memory=memory, healthy=healthy)
        return Card(
            index=self._index(uuid, position, found),
            uuid=uuid,
            model=self._nvml.nvmlDeviceGetName(handle),
            memory=memory,
            healthy=healthy,
            numa=self._host.numa_node(self._nvml.nvmlDeviceGetPciInfo(handle).busId),
            minor=self._nvml.nvmlDeviceGetMinorNumber(handle),
        )

    def _index(self, uuid: str, position: int, found: Mapping[str, Card]) -> int:
        """Return the index of a new card.

        NVML renumbers the cards when one is removed. Allocation records name cards by index, so a card keeps the index
        that an earlier agent reported. Any other card gets its number in NVML, or a new index if that number is or was
        the index of another card.
        """
        used = {card.index for card in (*self._cards.values(), *found.values())}
        before = self._indexes or {}
        if uuid in before and before[uuid] not in used:
            return before[uuid]
        used.update(before.values())
        return position if position not in used else max(used) + 1

    def _wait_for_event(self, stop: threading.Event) -> bool:
        """Wait up to `_EVENT_WAIT_MS` for an event. Return whether the cards must be read again."""
        if not self._open:
            stop.wait(_EVENT_WAIT_MS / 1000)
            return False
        try:
            event = self._nvml.nvmlEventSetWait(self._events, _EVENT_WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return False
            log.warning("waiting for health events failed: %s", error)
            stop.wait(_EVENT_WAIT_MS / 1000)
            return True
        if event.eventType != pynvml.nvmlEventTypeXidCriticalError or event.eventData in APPLICATION_XIDS:
            return False
        self._record_error(event)
        return True

    def _record_error(self, event: Any) -> None:
        try:
            uuids = [self._nvml.nvmlDeviceGetUUID(event.device)]
        except pynvml.NVMLError:
            # The card does not report its UUID any more, so the error may concern any card.
            uuids = sorted(self._cards)
        log.error("XID %d on %s", event.eventData, ", ".join(uuids), extra={"xid": event.eventData})
        self._errors.update(dict.fromkeys(uuids, self._clock()))
