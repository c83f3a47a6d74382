"""Errors that carry the decision: a bad object (which field, which rule) or retry later. Nothing else.

"Does not fit" is no error: it is a `Rejection`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One broken rule: the path of the field and a sentence that a user can act on."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


PROBLEMS = 20
"""Problems that one message lists. People mend the first ones first; an answer must not be larger than its question."""
TEXT = 1024
"""Characters of one text that a message repeats: resource names and annotation keys have at most 317."""


def shortened(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"


def summary(problems: Sequence[Problem]) -> str:
    """All problems in one line: the first ones, and how many more there are."""
    more = len(problems) - PROBLEMS
    texts = [shortened(str(problem)) for problem in problems[:PROBLEMS]]
    return "; ".join([*texts, f"and {more} more"] if more > 0 else texts)


def first(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems that a message lists, for keeping: an object from outside may have any number, of any length."""
    return tuple(Problem(shortened(p.field), shortened(p.message)) for p in problems[:PROBLEMS])


class BadObject(Exception):
    """The object itself is wrong; asking again with the same object cannot help.

    Holds every problem that was found; its message lists the first ones.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(summary(self.problems))


class RetryLater(Exception):
    """The answer is not known yet (caches not in sync, another replica leads, the API did not answer)."""
