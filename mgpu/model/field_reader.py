"""Reads typed values from decoded JSON, and collects a problem for each value of the wrong type.

`mgpu.model.pods` reads Pods and Nodes with it. Users write the objects, so the number of problems is limited.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mgpu.model.compute_resources import (
    NO_CPU_MEMORY,
    UNBOUNDED,
    CpuMemory,
    allocatable_cpu_memory,
    requested_cpu_memory,
)
from mgpu.model.errors import Problem, Rule, raise_if_any
from mgpu.model.quantities import MAX_QUANTITY, QuantityError
from mgpu.model.raw_objects import is_integer

_MAX_CHARACTERS = 1 << 18
"""The most characters of a Node's labels, annotations or capacity: the API server's own limit for annotations."""
_MAX_ENTRIES = 1024
"""The most entries of a Node's labels, annotations or capacity. 50,000 short labels fit into 256 KiB, but need 6 MiB
once they are decoded."""
_MAX_PROBLEMS = 1000
"""The most problems of one object. A list of 100,000 numbers in place of objects must not lead to 100,000 messages."""


class FieldReader:
    """Reads values from one object. A value of the wrong type adds a problem, and `finish` raises all problems.

    A missing value (None) is not a problem: the result is then empty or 0. Problems name the argument `path`, which is
    the path of the value in the object. Create one FieldReader for each object.
    """

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def finish(self) -> None:
        raise_if_any(self._problems)

    @property
    def is_full(self) -> bool:
        """Whether further problems are ignored."""
        return len(self._problems) >= _MAX_PROBLEMS

    def _wrong(self, path: str, expected: str, value: object) -> None:
        self._add(path, f"must be {expected}, not {type(value).__name__}", Rule.FIELD_TYPE)

    def _add(self, path: str, message: str, rule: Rule = Rule.OTHER) -> None:
        if not self.is_full:
            self._problems.append(Problem(path, message, rule))

    def limit(self, table: Mapping[str, str], path: str) -> None:
        """Add a problem if a table of a Node is larger than mgpu stores."""
        size = sum(len(key) + len(text) for key, text in table.items())
        if size > _MAX_CHARACTERS:
            self._add(path, f"has {size} characters, more than the {_MAX_CHARACTERS} that mgpu stores")
        if len(table) > _MAX_ENTRIES:
            self._add(path, f"has {len(table)} entries, more than the {_MAX_ENTRIES} that mgpu stores")

    def require_unique_names(self, containers: Iterable[tuple[str, str]]) -> None:
        """Add a problem for each container that has the name of an earlier container.

        Allocation records refer to containers by name. The API server rejects such pods too, but only after mutating
        admission.

        Args:
            containers: the name and the path of each container.
        """
        seen: dict[str, str] = {}
        for name, path in containers:
            if name and name in seen:
                self._add(f"{path}.name", f"{name!r} is already the name of {seen[name]}", Rule.CONTAINER_NAME)
            seen.setdefault(name, path)

    def cpu_memory(self, pod: Mapping[str, Any], spec: Mapping[str, Any]) -> CpuMemory:
        """Return the cpu and memory that the pod reserves.

        Call this method after the containers have been read, because it does not check their fields. If an amount is
        not a quantity, the result is `NO_CPU_MEMORY`. The API server rejects such a pod after mutating admission.
        """
        self.amounts(spec.get("overhead"), "spec.overhead")
        of_pod = self.table(spec.get("resources"), "spec.resources")
        for kind in ("requests", "limits"):
            self.amounts(of_pod.get(kind), f"spec.resources.{kind}")
        try:
            return NO_CPU_MEMORY if self._problems else requested_cpu_memory(pod)
        except QuantityError:
            return NO_CPU_MEMORY

    def allocatable(self, node: Mapping[str, Any], status: Mapping[str, Any]) -> CpuMemory:
        """Return the allocatable cpu and memory of a node, or `UNBOUNDED` if they cannot be read."""
        self.amounts(status.get("allocatable"), "status.allocatable")
        try:
            return UNBOUNDED if self._problems else allocatable_cpu_memory(node)
        except QuantityError:
            return UNBOUNDED

    def table(self, value: object, path: str) -> Mapping[str, Any]:
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self._wrong(path, "an object", value)
        return {}

    def rows(self, value: object, path: str) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, list):
            return value
        self._wrong(path, "a list", value)
        return []

    def text(self, value: object, path: str) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        self._wrong(path, "a string", value)
        return ""

    def integer(self, value: object, path: str) -> int:
        if value is None:
            return 0
        if is_integer(value, -MAX_QUANTITY, MAX_QUANTITY):
            return value
        self._wrong(path, "a 64-bit integer", value)
        return 0

    def texts(self, value: object, path: str) -> Mapping[str, str]:
        table = self.table(value, path)
        if all(type(text) is str for text in table.values()):
            return dict(table)  # A pod may have 100,000 labels, so avoid building a path for each of them.
        return {k: self.text(v, f"{path}[{k}]") for k, v in table.items()}

    def amounts(self, value: object, path: str) -> Mapping[str, str]:
        """Return quantities as text. The API accepts bare numbers too and stores them as text."""
        table = self.table(value, path)
        for name, amount in table.items():
            if isinstance(amount, bool) or not isinstance(amount, str | int | float):
                self._wrong(f"{path}[{name}]", "a quantity", amount)
        return {k: str(v) for k, v in table.items()}
