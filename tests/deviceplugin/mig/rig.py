"""Simulated MIG cards for tests, and an NVML that fails or crashes at a chosen call."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from deviceplugin.mig.mig_driver import MigCard, NvmlMig
from mgpu.model.cards import Card
from mgpu.model.mig import Instance
from playground.simulated_nvml import SimulatedNvml

GIB = 1 << 30
A100, H100, A30, T4 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA A30", "Tesla T4"
GPU = "GPU-0"


def gpu(index: int = 0, model: str = A100, gib: int = 80) -> Card:
    return Card(index, f"GPU-{index}", model, gib * GIB)


class Crash(BaseException):
    """The agent is killed. No code of it runs afterwards."""


class Flaky:
    """An NVML of which a call fails after `left` successful calls; none fails if `left` is None.

    The call raises `error`, as do the next calls, `times` in all. If `error` is None the agent dies instead, before the
    call or `after` it. Only functions count whose name begins with one of `only`.
    """

    def __init__(self, nvml: SimulatedNvml) -> None:
        self._nvml = nvml
        self._dead = False
        self.left: int | None = None
        self.error: int | None = None
        self.times, self.after = 1, False
        self.only: tuple[str, ...] = ("nvml",)

    def fail(self, left: int, error: int, *only: str, times: int = 1) -> None:
        self.left, self.error, self.only, self.times = left, error, only or self.only, times

    def heal(self) -> None:
        self.left, self._dead, self.error = None, False, None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if self._dead:
            raise Crash
        if self.left is None or not name.startswith(self.only):
            return getattr(self._nvml, name)(*arguments, **named)
        self.left -= 1
        if self.left >= 0:
            return getattr(self._nvml, name)(*arguments, **named)
        if self.error is not None:
            if self.left == -self.times:
                self.left = None
            raise pynvml.NVMLError(self.error)
        if self.after:
            getattr(self._nvml, name)(*arguments, **named)
        self._dead = True
        raise Crash


CHANGES = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
    "nvmlDeviceSetMigMode",
)


class Rig:
    """A machine with these cards. `driver` uses the failing NVML; the methods use one that never fails."""

    def __init__(self, folder: Path, *cards: Card) -> None:
        self.file = folder / "mig.json"
        self.cards = cards or (gpu(),)
        self.flaky = Flaky(SimulatedNvml(self.file, self.cards))
        self.driver = NvmlMig(self.flaky)
        self._looking = NvmlMig(SimulatedNvml(self.file, self.cards))

    def on(self, *uuids: str) -> "Rig":
        for uuid in uuids or (GPU,):
            assert self._looking.set_mode(uuid, on=True) is None
        return self

    def make(self, *instances: Instance, uuid: str = GPU) -> "Rig":
        for instance in instances:
            self._looking.create(uuid, instance)
        return self

    def card(self, uuid: str = GPU) -> MigCard:
        return next(card for card in self._looking.read() if card.uuid == uuid)

    def made(self, uuid: str = GPU) -> dict[Instance, str]:
        """Return the existing instances, and the UUID of the MIG device of each; "" for incomplete ones."""
        return {made.instance: made.uuid for made in self.card(uuid).instances}


def instance(text: str) -> Instance:
    """`2g.20gb@4`"""
    profile, _, start = text.partition("@")
    return Instance(int(start), profile)


def instances(*texts: str) -> frozenset[Instance]:
    return frozenset(map(instance, texts))
