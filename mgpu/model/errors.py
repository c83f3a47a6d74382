"""Defines the errors `BadObject` and `RetryLater`, and the problems that a `BadObject` lists.

Any package may raise the two errors, and each server maps them to its protocol in one place. A pod that does not fit is
not an error: the answer is a value, `mgpu.model.gpu_requests.Rejection`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum


class Rule(StrEnum):
    """The rule that an object breaks.

    The values are the label `rule` of the metric `mgpu_admission_denials` (docs/metrics.md). They must not change,
    because users' dashboards contain them.
    """

    ONE_VOCABULARY = "one-vocabulary"
    ONE_PARTITIONING_MODE = "one-way-of-partitioning"
    REQUEST_EQUALS_LIMIT = "request-equals-limit"
    PLACEMENT_IS_RESERVED = "placement-is-ours"
    REQUEST_IS_FIXED = "request-is-fixed"
    MTGPU_ON_A_POD = "mtgpu-on-a-pod"
    SHARE_RESOURCE = "share-resource"
    CONSTRAINT_IN_TIME = "constraint-in-time"
    CONSTRAINT_IMPOSSIBLE = "constraint-impossible"
    CONSTRAINT_MALFORMED = "constraint-malformed"
    POLICY = "policy"
    QUANTITY = "quantity"
    TOO_MUCH = "too-much"
    EVEN_OVER_CARDS = "even-over-cards"
    WHOLE_CARDS = "whole-cards"
    AT_MOST_A_CARD = "at-most-a-card"
    MEMORY_OF_WHOLE_CARDS = "memory-of-whole-cards"
    MEMORY_MINIMUM = "memory-minimum"
    CORE_WITH_MEMORY = "core-with-memory"
    CONTAINER_LIST = "container-list"
    CONTAINER_NAME = "container-name"
    RESOURCE_COMBINATION = "resource-combination"
    RESOURCE_NAME = "resource-name"
    ISOLATION_PROVIDER = "isolation-provider"
    MTGPU_INCOMPLETE = "mtgpu-incomplete"
    MTGPU_MALFORMED = "mtgpu-malformed"
    MTGPU_ONE_REQUEST = "mtgpu-requests-once"
    TOO_LARGE = "too-large"
    FIELD_TYPE = "field-type"
    OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One broken rule.

    Comparisons ignore the rule, since it follows from the field and the message.

    Attributes:
        field: the path of the field.
        message: a text that continues the path to a sentence, and from which users learn what to change.
        rule: the rule under which the metrics of admission count the problem.
    """

    field: str
    message: str
    rule: Rule = dataclass_field(default=Rule.OTHER, compare=False)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


MAX_PROBLEMS = 20
"""The most problems that one message lists, so that an invalid object does not lead to a large answer."""
MAX_TEXT = 1024
"""The most characters of one text in a message. Valid resource names and annotation keys have at most 317."""


def shorten(text: str) -> str:
    """Return the text. If it has more than `MAX_TEXT` characters, `…` replaces the rest."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def summarize(problems: Sequence[Problem]) -> str:
    """Return one line with the first problems and the number of further ones."""
    more = len(problems) - MAX_PROBLEMS
    texts = [shorten(str(problem)) for problem in problems[:MAX_PROBLEMS]]
    return "; ".join([*texts, f"and {more} more"] if more > 0 else texts)


def shorten_problems(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the first problems with shortened texts.

    Store only such problems, since an object of a user may have any number of problems of any length.
    """
    return tuple(Problem(shorten(p.field), shorten(p.message), p.rule) for p in problems[:MAX_PROBLEMS])


class BadObject(Exception):
    """The object itself is invalid, so trying again with the same object cannot help.

    Attributes:
        problems: every problem found. The message lists the first ones.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(summarize(self.problems))


def raise_if_any(problems: Sequence[Problem]) -> None:
    if problems:
        raise BadObject(problems)


class RetryLater(Exception):
    """The answer is not known yet, for example because caches are not in sync or another replica leads."""
