"""The part of the simulated NVML that all of its functions need: starts and stops, cards, and handles.

`playground.simulated_memory` adds processes, memory and utilization, and `playground.simulated_nvml` adds MIG. The
functions have the names and the arguments of `pynvml`, so that the agent's own code runs on them unchanged.
"""

# ruff: noqa: N802 (the names are the pynvml module's)

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml

from mgpu.model.cards import Card
from playground.nvml_state import Mode, read_state

_FIRST_HANDLE = 0x1000  # any value but 0, which would be a null pointer


def fail(code: int) -> pynvml.NVMLError:
    """Return the error that pynvml raises for one of NVML's return codes."""
    return pynvml.NVMLError(code)


class SimulatedLibrary:
    """The NVML library of one process. The cards' state is in a file, so it survives a restart of the agent.

    As in the real library, a handle is valid until NVML is shut down or the object of the handle is gone. Only one
    thread at a time may use an instance, but other processes may use the same file. nvml.h documents the methods; the
    docstrings here only add what nvml.h leaves open.

    Attributes:
        cards: The cards that are plugged in. The attribute may be set to other cards at any time.
    """

    def __init__(self, state_file: Path, cards: Sequence[Card]) -> None:
        self.cards = cards
        self._file = state_file
        self._starts = 0
        self._handles: dict[int, tuple[str, ...]] = {}
        self._addresses: dict[tuple[str, ...], int] = {}

    def nvmlInit(self) -> None:
        self._starts += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self._starts -= 1
        if not self._starts:
            self._handles.clear()
            self._addresses.clear()

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check()
        return read_state(self._file).driver

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._check()
        if not 0 <= index < len(self.cards):
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._handle(pynvml.c_nvmlDevice_t, "card", sorted(self.cards, key=lambda card: card.index)[index].uuid)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._check()
        if all(card.uuid != uuid for card in self.cards):
            raise fail(pynvml.NVML_ERROR_NOT_FOUND)
        return self._handle(pynvml.c_nvmlDevice_t, "card", uuid)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._card(handle).uuid

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._card(handle).model

    # Handles.

    def _check(self) -> None:
        if not self._starts:
            raise fail(pynvml.NVML_ERROR_UNINITIALIZED)

    def _privileged(self) -> None:
        self._check()
        if not read_state(self._file).privileged:
            raise fail(pynvml.NVML_ERROR_NO_PERMISSION)

    def _handle(self, kind: Any, *key: str) -> Any:
        """Return a handle for a card, an instance or a MIG device. Equal keys get the same handle.

        The handle has pynvml's own type, so that it can be stored in pynvml's arrays. Nothing dereferences the pointer.
        """
        address = self._addresses.setdefault(key, _FIRST_HANDLE + len(self._addresses))
        self._handles[address] = key
        return ctypes.cast(address, kind)

    def _key(self, handle: Any, *kinds: str) -> tuple[str, ...]:
        """Return the key of a handle. Raises INVALID_ARGUMENT if the handle is unknown or not of one of these kinds."""
        self._check()
        key = self._handles.get(ctypes.cast(handle, ctypes.c_void_p).value or 0)
        if key is None or key[0] not in kinds:
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return key

    def _card(self, handle: Any) -> Card:
        uuid = self._key(handle, "card")[1]
        found = next((card for card in self.cards if card.uuid == uuid), None)
        if found is None:
            raise fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        return found

    def _mode(self, handle: Any) -> Mode:
        """Return the MIG mode of a card, which the caller must not change."""
        return read_state(self._file).cards.get(self._card(handle).uuid, Mode())
