"""The card source of simulated cards, for clusters without GPUs. It reads the file in the setting `deviceplugin.cards`.

`deviceplugin.main` and the playground's simulated NVML create `SimulatedCards`. The production image contains this
module, but not the playground, which simulates MIG mode and MIG instances. So `simulated_mig` looks for the playground
by an entry point. If the playground is not installed, simulated cards behave like cards without MIG.
"""

import logging
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigInstance, MigRefused
from mgpu.model.cards import Card
from mgpu.model.device_object import read_card_list
from mgpu.model.errors import BadObject, Problem, RetryLater
from mgpu.model.mig import Instance

log = logging.getLogger(__name__)

MIG_GROUP = "mgpu.simulated_mig"
"""The entry point group of the MIG simulator in pyproject.toml. The entry point is a function that returns a
`MigDriver` and has the same arguments as `simulated_mig`."""
PROCESSES_GROUP = "mgpu.simulated_processes"
"""The entry point group of the simulated processes. The entry point has the same interface as `simulated_processes`."""
_CHECK_SECONDS = 0.5
_NO_MIG = "MIG of simulated cards needs the Python package `playground` of mgpu, which is not installed here"


class SimulatedCards:
    """The card source that reads a YAML or JSON file. Changes of the file take effect at the next `read`.

    Args:
        file: The file, which contains a list of cards in the form that `read_card_list` describes.
        node: The name of the node. Cards without a UUID get one that contains this name.
    """

    driver = ""

    def __init__(self, file: Path, node: str) -> None:
        self._file = file
        self._node = node
        self._read: tuple[bytes, tuple[Card, ...]] | None = None

    def read(self) -> tuple[Card, ...]:
        """Return the cards that the file lists now. Raises BadObject if the file is missing or invalid."""
        content = self._content()
        if self._read is None or self._read[0] != content:
            self._read = content, self._parse(content)
        return self._read[1]

    def wait(self, stop: threading.Event) -> None:
        stop.wait(_CHECK_SECONDS)

    def close(self) -> None:
        """Do nothing, since `read` leaves no file open."""

    def _content(self) -> bytes:
        try:
            return self._file.read_bytes()
        except OSError as error:
            raise BadObject([Problem(str(self._file), f"cannot be read: {error.strerror}")]) from error

    def _parse(self, content: bytes) -> tuple[Card, ...]:
        try:
            rows = yaml.safe_load(content)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadObject([Problem(str(self._file), f"is not YAML: {' '.join(str(error).split())}")]) from error
        return read_card_list(rows, self._node, str(self._file))


class NoMig:
    """The MIG driver of simulated cards if no simulator is installed.

    It reports that no card supports MIG, and refuses every change.
    """

    def __init__(self, source: SimulatedCards) -> None:
        self._source = source

    def read(self) -> tuple[MigCard, ...]:
        try:
            return tuple(MigCard(card.uuid, capable=False) for card in self._source.read())
        except BadObject as error:
            raise RetryLater(str(error)) from error

    def create(self, uuid: str, instance: Instance) -> MigInstance:  # noqa: ARG002
        raise MigRefused(_NO_MIG)

    def destroy(self, uuid: str, instance: Instance) -> None:  # noqa: ARG002
        raise MigRefused(_NO_MIG)

    def set_mode(self, uuid: str, *, on: bool) -> str:  # noqa: ARG002
        raise MigRefused(_NO_MIG)


def simulated_mig(file: Path, node: str) -> MigDriver:
    """Return the installed MIG simulator for the cards in `file`, or `NoMig` if none is installed."""
    make = _simulator(MIG_GROUP)
    if make is None:
        log.info(_NO_MIG)
        return NoMig(SimulatedCards(file, node))
    driver: MigDriver = make(file, node)
    return driver


def simulated_processes(file: Path, node: str) -> tuple[Any, Path] | None:
    """Return the installed simulation of the processes on the cards in `file`, or None if none is installed.

    The first item has the functions of `pynvml`, and the second one is a folder like /proc.
    """
    make = _simulator(PROCESSES_GROUP)
    return None if make is None else make(file, node)


def _simulator(group: str) -> Callable[[Path, str], Any] | None:
    for entry in entry_points(group=group):
        # In the production image, mgpu's package metadata lists the entry point although `playground` is not installed.
        if find_spec(entry.module.partition(".")[0]) is not None:
            make: Callable[[Path, str], Any] = entry.load()
            return make
    return None
