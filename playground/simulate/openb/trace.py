"""Reads the CSV files of the openb trace: a list of nodes and a list of pods.

`mgpu simulate openb` and `bench.openb` call `read_trace`.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mgpu.model.errors import BadObject, Problem
from scheduler.engine.learning.shapes import CARD, NodeClass, Shape

T = TypeVar("T")

_MIB = 1 << 20
_MOST = 10**9  # the limit of cpu_milli and memory_mib; no machine has that much, and no sum overflows int64
_MOST_CARDS = 256
_NODE_COLUMNS = ("cpu_milli", "memory_mib", "gpu", "model")
_POD_COLUMNS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


@dataclass(frozen=True, slots=True)
class Trace:
    """The nodes and the pods of a trace, in the order of the files."""

    nodes: tuple[NodeClass, ...]
    pods: tuple[Shape, ...]

    @property
    def capacity(self) -> int:
        """The compute of all cards together, in thousandths of a card."""
        return CARD * sum(node.cards for node in self.nodes)


def read_trace(nodes: Path, pods: Path) -> Trace:
    """Return the trace that a file of nodes and a file of pods contain.

    The columns may be in any order, and unknown columns are ignored.

    Raises:
        BadObject: A file cannot be read or is invalid. The error has one problem, which names the file and, if there is
            one, the line and the column.
    """
    trace = Trace(tuple(_rows(nodes, _NODE_COLUMNS, _node)), tuple(_rows(pods, _POD_COLUMNS, _pod)))
    if not trace.capacity:
        raise BadObject([Problem(f"{nodes}: gpu", "no node has a GPU")])
    if not any(pod.cards for pod in trace.pods):
        raise BadObject([Problem(f"{pods}: num_gpu", "no pod requests a GPU")])
    return trace


def demand(pod: Shape) -> int:
    """Return how much compute a pod requests on all its cards together, in thousandths of a card."""
    return pod.cards * pod.core


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a file.

    Attributes:
        where: The file and the number of the line, for messages.
        cells: The cells, by the name of the column.
    """

    where: str
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return the text in a column, or "" if the line has no such cell."""
        return self.cells.get(column, "").strip()

    def number(self, column: str, most: int, least: int = 0) -> int:
        """Return the number in a column. Raises BadObject if it is not a whole number from `least` to `most`."""
        text = self.text(column)
        if not (text.isascii() and text.isdigit() and len(text) <= 18 and least <= int(text) <= most):
            raise self.wrong(column, f"must be a whole number from {least} to {most}, not {text[:40]!r}")
        return int(text)

    def wrong(self, column: str, rule: str) -> BadObject:
        """Return the error for a cell that breaks a rule."""
        return BadObject([Problem(f"{self.where}: {column}", rule)])


def _node(row: _Row) -> NodeClass:
    model = row.text("model")
    if "|" in model:
        raise row.wrong("model", "must be one model")
    cpu, memory = row.number("cpu_milli", _MOST), row.number("memory_mib", _MOST) * _MIB
    return NodeClass(cpu, memory, row.number("gpu", _MOST_CARDS), model)


def _pod(row: _Row) -> Shape:
    cards = row.number("num_gpu", _MOST_CARDS)
    models = {model.strip() for model in row.text("gpu_spec").split("|")} - {""}
    return Shape(
        cpu=row.number("cpu_milli", _MOST),
        memory=row.number("memory_mib", _MOST) * _MIB,
        cards=cards,
        core=row.number("gpu_milli", CARD, 1) if cards else row.number("gpu_milli", 0),
        models=tuple(sorted(models)) if cards else (),
    )


def _rows(file: Path, columns: tuple[str, ...], read: Callable[[_Row], T]) -> Iterator[T]:
    """Yield what `read` returns for every line below the header, except for blank lines.

    Raises BadObject, for example if the header does not contain each of `columns` exactly once.
    """
    lines = _lines(file)
    where, cells = next(lines, (f"{file}: line 1", None))
    if cells is None:
        raise BadObject([Problem(f"{where}: row", "is missing: the list is empty")])
    header = [cell.strip() for cell in cells]
    for column in columns:
        if header.count(column) != 1:
            rule = "is missing in the header" if column not in header else "is in the header more than once"
            raise BadObject([Problem(f"{where}: {column}", rule)])
    empty = True
    for where, cells in lines:
        empty = False
        if len(cells) > len(header):
            raise BadObject([Problem(f"{where}: row", f"has {len(cells)} cells where the header has {len(header)}")])
        yield read(_Row(where, dict(zip(header, cells, strict=False))))
    if empty:
        raise BadObject([Problem(f"{file}: line 2: row", "is missing: the list is empty")])


def _lines(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the position, such as `FILE: line 2`, and the cells of every line that is not blank."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, strict=True)
            try:
                yield from ((f"{file}: line {reader.line_num}", cells) for cells in reader if cells)
            except csv.Error as error:
                raise BadObject([Problem(f"{file}: line {reader.line_num}: row", f"is not CSV: {error}")]) from error
    except OSError as error:
        raise BadObject([Problem(str(file), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise BadObject([Problem(str(file), "is not text in UTF-8")]) from error
