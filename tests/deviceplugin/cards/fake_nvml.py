"""A fake NVML: errors by code, handles that stay lost, and indexes that shift when a card is pulled out."""

import queue
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


@dataclass
class FakeCard:
    uuid: str
    minor: int = 0
    memory: int = 80 * GIB
    bus: str = "00000000:3B:00.0"
    lost: bool = False
    mig: int | None = None


@dataclass
class FakeNvml:
    """The functions of `pynvml`. `cards` are plugged in, nvmlInit has `found` some; `driver` is an error code."""

    cards: list[FakeCard]
    driver: int = 0
    starts: int = 0
    events: "queue.Queue[tuple[str, int]]" = field(default_factory=queue.Queue)
    found: list[FakeCard] | None = None
    no_mig: int = pynvml.NVML_ERROR_NOT_SUPPORTED

    def _check(self, handle: FakeCard | None = None) -> None:
        if self.driver:
            raise pynvml.NVMLError(self.driver)
        if self.found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if handle is not None and (handle.lost or handle not in self.cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlInit(self) -> None:  # noqa: N802
        if self.driver:
            raise pynvml.NVMLError(self.driver)
        self.starts += 1
        self.found = list(self.cards)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check()
        self.found = None

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._check()
        return "570.86.15"

    def nvmlDeviceGetMigMode(self, handle: FakeCard) -> list[int]:  # noqa: N802
        """Return the mode; raise if the card has no MIG."""
        self._check(handle)
        if handle.mig is None:
            raise pynvml.NVMLError(self.no_mig)
        return [handle.mig, handle.mig]

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check()
        return len(self.found or ())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        self._check()
        card = (self.found or [])[index]
        self._check(card)
        return card

    def nvmlDeviceGetUUID(self, handle: FakeCard) -> str:  # noqa: N802
        self._check(handle)
        return handle.uuid

    def nvmlDeviceGetMinorNumber(self, handle: FakeCard) -> int:  # noqa: N802
        self._check(handle)
        return handle.minor

    def nvmlDeviceGetName(self, handle: FakeCard) -> str:  # noqa: N802
        self._check(handle)
        return "NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard) -> Any:  # noqa: N802
        self._check(handle)
        return SimpleNamespace(total=handle.memory)

    def nvmlDeviceGetPciInfo(self, handle: FakeCard) -> Any:  # noqa: N802
        self._check(handle)
        return SimpleNamespace(busId=handle.bus)

    def nvmlDeviceGetSupportedEventTypes(self, handle: FakeCard) -> int:  # noqa: N802
        self._check(handle)
        return int(pynvml.nvmlEventTypeXidCriticalError)

    def nvmlDeviceRegisterEvents(self, handle: FakeCard, kinds: int, events: Any) -> None:  # noqa: N802, ARG002
        self._check(handle)

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        self._check()
        return object()

    def nvmlEventSetFree(self, events: object) -> None:  # noqa: N802, ARG002
        self._check()

    def nvmlEventSetWait(self, events: object, milliseconds: int) -> Any:  # noqa: N802, ARG002
        """Return the next event, or time out at once."""
        self._check()
        try:
            uuid, xid = self.events.get_nowait()
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        device = next(card for card in self.cards if card.uuid == uuid)
        return SimpleNamespace(device=device, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)
