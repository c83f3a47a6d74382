"""Reads the constraints on cards that a pod of any vocabulary may set in annotations `mgpu.io/…`.

`mgpu.dialects` reads the constraints, and finds those that contradict one another for admission. The placement engine
applies them when it decides the pod's cards. Users rely on the annotations, their syntax and the matching of models, so
these must not change (docs/constraints.md).
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mgpu.model.cards import Card
from mgpu.model.errors import Problem, Rule
from mgpu.model.groups import Group
from mgpu.model.raw_objects import annotation_path

PREFIX = "mgpu.io/"
CARD_POLICY = PREFIX + "card-policy"
CARD_MODELS = PREFIX + "card-models"
EXCLUDE_CARD_MODELS = PREFIX + "exclude-card-models"
CARD_UUIDS = PREFIX + "card-uuids"
SPREAD_GROUP = PREFIX + "spread-group"
SAME_CARD_GROUP = PREFIX + "same-card-group"
CONSTRAINT_ANNOTATIONS = (CARD_POLICY, CARD_MODELS, EXCLUDE_CARD_MODELS, CARD_UUIDS, SPREAD_GROUP, SAME_CARD_GROUP)

MAX_ENTRIES = 100
"""The most entries of a list. The filter compares each of them with the cards of thousands of nodes."""
MAX_ENTRY_LENGTH = 128
"""The most characters of an entry. It is limited because `_words` caches entries. A UUID has 40 characters, and a model
name about 30."""

NOT_LISTED = "not among card-uuids"

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Constraints:
    """The constraints of one pod.

    Attributes:
        card_policy: the card policy for this pod; "" for the policy in the settings.
        models, excluded_models: the allowed models (() for all) and the excluded ones, as the user writes them
            (`matches_model`).
        uuids: the UUIDs of the allowed cards; () for all.
        spread: the group whose pods get different cards if possible.
        same_card: the group whose pods must share one card.
    """

    card_policy: str = ""
    models: tuple[str, ...] = ()
    excluded_models: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    spread: Group | None = None
    same_card: Group | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        if self.spread is None and self.same_card is None:
            return ()  # Nearly all pods have no groups, and this is read with every change of a holding.
        return tuple(group for group in (self.spread, self.same_card) if group)

    @property
    def limits_cards(self) -> bool:
        """Whether the constraints exclude cards regardless of their free capacity."""
        return bool(self.models or self.excluded_models or self.uuids)

    def allows_model(self, model: str) -> bool:
        return self.reason_against_model(model) is None

    def reason_against(self, card: Card) -> str | None:
        """Return the reason why the card's model or UUID is not allowed, or None if both are allowed.

        Messages count the cards with equal reasons, so the reason must not name the card.
        """
        if self.uuids and card.uuid not in self.uuids:
            return NOT_LISTED
        return self.reason_against_model(card.model)

    def reason_against_model(self, model: str) -> str | None:
        """Return the reason why cards of a model are not allowed, or None if they are allowed."""
        if self.models and not any(matches_model(allowed, model) for allowed in self.models):
            return f"model {model or 'unknown'} not among card-models"
        if any(matches_model(excluded, model) for excluded in self.excluded_models):
            return f"model {model} excluded by exclude-card-models"
        return None

    def texts(self) -> dict[str, str]:
        """Return the equivalent annotations without their prefix: `{"card-models": "A100,H100"}`."""
        texts = {
            CARD_POLICY: self.card_policy,
            CARD_MODELS: ",".join(self.models),
            EXCLUDE_CARD_MODELS: ",".join(self.excluded_models),
            CARD_UUIDS: ",".join(self.uuids),
            SPREAD_GROUP: self.spread.name if self.spread else "",
            SAME_CARD_GROUP: self.same_card.name if self.same_card else "",
        }
        return {key.removeprefix(PREFIX): text for key, text in texts.items() if text}

    def __str__(self) -> str:
        """Return a text such as `card-models A100,H100; spread-group web`."""
        return "; ".join(f"{key} {text}" for key, text in self.texts().items())


NO_CONSTRAINTS = Constraints()


def matches_model(name: str, model: str) -> bool:
    """Return whether the name in a constraint matches the `model` that a card reports.

    Both are split into words at spaces, dashes, slashes and underscores. The words of the name must be consecutive
    words of the model, ignoring case: `A100` and `a100-sxm4` match `NVIDIA A100-SXM4-80GB`, but `H100` does not match
    `GH100`.
    """
    words = _words(name)
    return bool(words) and words in _words(model)


@lru_cache(maxsize=10_000)
def _words(model: str) -> str:
    """Return the words in lower case with a space before and after each; "" if there are none.

    Consecutive words are then a substring, which is found in linear time. The function must be fast without the cache
    too, since a user with many names can evict the entries of others.
    """
    words = " ".join(model.lower().replace("_", " ").replace("/", " ").replace("-", " ").split())
    return f" {words} " if words else ""


def read_constraints(
    annotations: Mapping[str, str], namespace: str, policies: Collection[str]
) -> tuple[Constraints, tuple[Problem, ...]]:
    """Return the constraints in a pod's annotations that can be read, and the problems with the annotations.

    Args:
        policies: the names that `mgpu.io/card-policy` may have.
    """
    if not any(key in annotations for key in CONSTRAINT_ANNOTATIONS):
        return NO_CONSTRAINTS, ()
    problems: list[Problem] = []
    models = _listed(annotations, CARD_MODELS, problems)
    excluded = _listed(annotations, EXCLUDE_CARD_MODELS, problems)
    for key, names in ((CARD_MODELS, models), (EXCLUDE_CARD_MODELS, excluded)):
        problems += (_malformed(key, f"{name!r} is not the name of a model") for name in names if not _words(name))
    constraints = Constraints(
        _policy(annotations, policies, problems),
        models,
        excluded,
        _listed(annotations, CARD_UUIDS, problems),
        _group(annotations, SPREAD_GROUP, namespace, problems),
        _group(annotations, SAME_CARD_GROUP, namespace, problems),
    )
    if constraints.spread and constraints.same_card and constraints.spread.name == constraints.same_card.name:
        text = (
            f"{constraints.same_card.name!r} is also the spread-group; pods cannot share a card and get different cards"
        )
        problems.append(_malformed(SAME_CARD_GROUP, text))
    return constraints, tuple(problems)


def _policy(annotations: Mapping[str, str], policies: Collection[str], problems: list[Problem]) -> str:
    text = annotations.get(CARD_POLICY)
    if text is None or text.strip().lower() in policies:
        return (text or "").strip().lower()
    message = f"must be one of {', '.join(policies)}, not {text[:80]!r}"
    problems.append(Problem(annotation_path(CARD_POLICY), message, Rule.POLICY))
    return ""


def _listed(annotations: Mapping[str, str], key: str, problems: list[Problem]) -> tuple[str, ...]:
    if key not in annotations:
        return ()
    count = annotations[key].count(",") + 1
    entries = [entry.strip() for entry in annotations[key].split(",", MAX_ENTRIES)]
    if not any(entries):
        problems.append(_malformed(key, "must have at least one entry; leave it out to allow any"))
        return ()
    if count > MAX_ENTRIES:
        problems.append(_malformed(key, f"may have at most {MAX_ENTRIES} entries, not {count}"))
        return ()  # The time of the further checks grows with the length of the list.
    problems += (_malformed(key, f"entry {i} is empty") for i, entry in enumerate(entries) if not entry)
    long = [i for i, entry in enumerate(entries) if len(entry) > MAX_ENTRY_LENGTH]
    if long:
        text = f"has more than {MAX_ENTRY_LENGTH} characters"
        problems += (Problem(annotation_path(key), f"entry {i} {text}", Rule.TOO_LARGE) for i in long)
        return ()
    return tuple(dict.fromkeys(filter(None, entries)))


def find_contradictions(constraints: Constraints) -> Iterator[Problem]:
    """Yield a problem for each excluded model that matches an allowed one.

    Users choose the length of the lists, so comparing all pairs would be too slow. An excluded name matches an allowed
    name exactly if the words of the excluded name are the beginning of a suffix of the allowed name's words. Bisection
    finds the first candidate in the sorted list of all suffixes.
    """
    suffixes: dict[str, str] = {}
    for model in constraints.models if constraints.excluded_models else ():
        words = _words(model)
        suffixes.update((words[at:], model) for at, sign in enumerate(words[:-1]) if sign == " ")
    in_order = sorted(suffixes)
    for other in constraints.excluded_models:
        words = _words(other)
        at = bisect_left(in_order, words)
        if words and at < len(in_order) and in_order[at].startswith(words):
            text = f"{other!r} excludes {suffixes[in_order[at]]!r}, which {CARD_MODELS} allows"
            yield _malformed(EXCLUDE_CARD_MODELS, text)


def _group(annotations: Mapping[str, str], key: str, namespace: str, problems: list[Problem]) -> Group | None:
    name = annotations.get(key)
    if name is None:
        return None
    if _NAME.fullmatch(name):
        return Group(key.removeprefix(PREFIX), namespace, name)
    expected = "must be a name of 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
    problems.append(_malformed(key, f"{expected}, not {name[:80]!r}"))
    return None


def _malformed(key: str, text: str) -> Problem:
    return Problem(annotation_path(key), text, Rule.CONSTRAINT_MALFORMED)
