"""Errors that carry the decision: a bad object (which field, which rule) or retry later. Nothing else.

"Does not fit" is no error: it is a `Rejection`.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One broken rule: the path of the field and a sentence that a user can act on."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class BadObject(Exception):
    """The object itself is wrong; asking again with the same object cannot help. Holds every problem found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


class RetryLater(Exception):
    """The answer is not known yet (caches not in sync, another replica leads, the API did not answer)."""
