"""Reads what containers have used of their cards, from answers of Prometheus' HTTP API.

An answer of `/api/v1/query_range`, or of `/api/v1/query` with a range such as `metric[7d]`, is a matrix: a list of
series, each with its labels and its values. Only the labels `namespace`, `pod` and `container` are used, so an answer
to an aggregation, such as `max_over_time`, can be read too.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from mgpu.model.errors import BadObject, Problem

_LABELS = ("namespace", "pod", "container")


class Series(NamedTuple):
    """The key of a container of a pod."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """What was recorded of each container, for all its cards and times together.

    Attributes:
        memory: bytes of a card.
        sm: the utilization of the SMs of a card, from 0 to 1.
    """

    memory: Mapping[Series, tuple[float, ...]]
    sm: Mapping[Series, tuple[float, ...]]


def read_recorded_use(memory: Iterable[Path], sm: Iterable[Path]) -> RecordedUse:
    """Return what the files contain. Raises BadObject with the file and the path of the first problem."""
    return RecordedUse(_read(memory), _read(sm))


def _read(files: Iterable[Path]) -> dict[Series, tuple[float, ...]]:
    found: dict[Series, list[float]] = {}
    for file in files:
        for series, values in _series(file):
            found.setdefault(series, []).extend(values)
    return {series: tuple(values) for series, values in sorted(found.items()) if values}


def _series(file: Path) -> Iterator[tuple[Series, list[float]]]:
    try:
        answer = orjson.loads(file.read_bytes())
    except OSError as error:
        raise BadObject([Problem(str(file), f"cannot be read: {error.strerror}")]) from error
    except orjson.JSONDecodeError as error:
        raise BadObject([Problem(str(file), f"is not JSON: {error}")]) from error
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(data.get("result"), list):
        rule = "must be an answer of Prometheus with a matrix: {'data': {'resultType': 'matrix', 'result': […]}}"
        raise BadObject([Problem(str(file), rule)])
    for i, row in enumerate(data["result"]):
        where = f"{file}: data.result[{i}]"
        yield _labels(where, row), list(_values(where, row))


def _labels(where: str, row: Any) -> Series:
    labels = row.get("metric") if isinstance(row, dict) else None
    found = [labels.get(name) if isinstance(labels, dict) else None for name in _LABELS]
    if not all(isinstance(text, str) and text for text in found):
        raise BadObject([Problem(f"{where}.metric", f"must have the labels {', '.join(_LABELS)}")])
    return Series(*map(str, found))


def _values(where: str, row: Mapping[str, Any]) -> Iterator[float]:
    """Yield the values, except those that are not numbers of use, such as NaN."""
    values = row.get("values")
    if not isinstance(values, list):
        raise BadObject([Problem(f"{where}.values", "must be a list of [time, value]")])
    for i, pair in enumerate(values):
        try:
            _, text = pair
            value = float(text)
        except (TypeError, ValueError) as error:
            raise BadObject([Problem(f"{where}.values[{i}]", "must be [time, value]")]) from error
        if isfinite(value) and value >= 0:
            yield value
