"""Simulated cards, listed in a YAML or JSON file that is read again when it changes."""

import threading
from pathlib import Path

import yaml

from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, Problem
from mgpu.model.inventory import read_card_list

_CHECK_SECONDS = 0.5


class SimulatedCards:
    """`file`: a list of cards as `read_card_list` describes. Paths of errors begin with the file's path."""

    driver = ""

    def __init__(self, file: Path, node: str) -> None:
        self._file, self._node = file, node
        self._read: tuple[bytes, tuple[Card, ...]] | None = None

    def read(self) -> tuple[Card, ...]:
        content = self._content()
        if self._read is None or self._read[0] != content:
            self._read = content, self._parse(content)
        return self._read[1]

    def wait(self, stop: threading.Event) -> None:
        stop.wait(_CHECK_SECONDS)

    def close(self) -> None:
        pass

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
