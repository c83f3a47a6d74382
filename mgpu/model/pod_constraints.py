"""What any pod of any dialect may wish beside its ask, as annotations `mgpu.io/…`."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mgpu.model.cards import Card
from mgpu.model.errors import Problem
from mgpu.model.groups import Group

PREFIX = "mgpu.io/"
CARD_POLICY = PREFIX + "card-policy"
CARD_MODELS = PREFIX + "card-models"
EXCLUDE_CARD_MODELS = PREFIX + "exclude-card-models"
CARD_UUIDS = PREFIX + "card-uuids"
SPREAD_GROUP = PREFIX + "spread-group"
SAME_CARD_GROUP = PREFIX + "same-card-group"
ALL = (CARD_POLICY, CARD_MODELS, EXCLUDE_CARD_MODELS, CARD_UUIDS, SPREAD_GROUP, SAME_CARD_GROUP)

MOST = 100
"""Entries of a list: what a filter over thousands of nodes can afford."""
LONGEST = 128
"""Characters of an entry. A UUID has 40, a model name 30. Their words are remembered, text and all."""

NOT_LISTED = "not among card-uuids"
"""Why a card is out that is not one of those wished for."""

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Constraints:
    """card_policy: how cards are chosen for this pod; "": as set for others.

    models, excluded_models: as the user spells them (`matches` says what they match). uuids: only these cards.
    spread: its pods take different cards while there are any. same_card: its pods share one card, or wait.
    """

    card_policy: str = ""
    models: tuple[str, ...] = ()
    excluded_models: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    spread: Group | None = None
    same_card: Group | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for group in (self.spread, self.same_card) if group)

    @property
    def limits_cards(self) -> bool:
        """Whether some cards are out whatever is on them."""
        return bool(self.models or self.excluded_models or self.uuids)

    def allows_model(self, model: str) -> bool:
        return self.against(model) is None

    def bar(self, card: Card) -> str | None:
        """Why this card is out, as a kind to add up by; None: it is not. Looks at its model and UUID only."""
        if self.uuids and card.uuid not in self.uuids:
            return NOT_LISTED
        return self.against(card.model)

    def against(self, model: str) -> str | None:
        """Why cards of this model are out; None: they are not."""
        if self.models and not any(matches(wanted, model) for wanted in self.models):
            return f"model {model or 'unknown'} not among card-models"
        if any(matches(excluded, model) for excluded in self.excluded_models):
            return f"model {model} excluded by exclude-card-models"
        return None

    def shown(self) -> dict[str, str]:
        """The annotations that say the same, without prefix: `{"card-models": "A100,H100"}`."""
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
        """`card-models A100,H100; spread-group web`."""
        return "; ".join(f"{key} {text}" for key, text in self.shown().items())


NONE = Constraints()


def matches(wanted: str, model: str) -> bool:
    """Whether a model as a user names it is the `model` that a card reports.

    Both are cut into words at spaces, dashes, slashes and underscores; the wanted words must stand in the card's
    model one after the other, in any case. So `A100` and `a100-sxm4` are an `NVIDIA A100-SXM4-80GB`, while `H100` is
    no `GH100`, and `A10` no `A100`.
    """
    words = _words(wanted)
    return bool(words) and words in _words(model)


@lru_cache(maxsize=10_000)
def _words(model: str) -> str:
    """The words in lower case, a space before and after each; "" where there are none.

    Words in a row are a part of the text then, which is found in linear time. Working a text out again is cheap too:
    a user's pods can push others out of the memory.
    """
    words = " ".join(model.lower().replace("_", " ").replace("/", " ").replace("-", " ").split())
    return f" {words} " if words else ""


def field(key: str) -> str:
    """The path of an annotation."""
    return f"metadata.annotations[{key}]"


def read_constraints(
    annotations: Mapping[str, str], namespace: str, policies: Collection[str]
) -> tuple[Constraints, tuple[Problem, ...]]:
    """The wishes in a pod's annotations as far as they can be read, and what is wrong with them.

    policies: the card policies that there are.
    """
    if not any(key in annotations for key in ALL):
        return NONE, ()
    problems: list[Problem] = []
    models = _listed(annotations, CARD_MODELS, problems)
    excluded = _listed(annotations, EXCLUDE_CARD_MODELS, problems)
    for key, names in ((CARD_MODELS, models), (EXCLUDE_CARD_MODELS, excluded)):
        problems += (Problem(field(key), f"{name!r} names no model") for name in names if not _words(name))
    constraints = Constraints(
        _policy(annotations, policies, problems),
        models,
        excluded,
        _listed(annotations, CARD_UUIDS, problems),
        _group(annotations, SPREAD_GROUP, namespace, problems),
        _group(annotations, SAME_CARD_GROUP, namespace, problems),
    )
    if constraints.spread and constraints.same_card and constraints.spread.name == constraints.same_card.name:
        text = f"{constraints.same_card.name!r} is the spread-group too; pods cannot both share a card and avoid it"
        problems.append(Problem(field(SAME_CARD_GROUP), text))
    return constraints, tuple(problems)


def _policy(annotations: Mapping[str, str], policies: Collection[str], problems: list[Problem]) -> str:
    text = annotations.get(CARD_POLICY)
    if text is None or text.strip().lower() in policies:
        return (text or "").strip().lower()
    problems.append(Problem(field(CARD_POLICY), f"must be one of {', '.join(policies)}, not {text[:80]!r}"))
    return ""


def _listed(annotations: Mapping[str, str], key: str, problems: list[Problem]) -> tuple[str, ...]:
    if key not in annotations:
        return ()
    count = annotations[key].count(",") + 1
    entries = [entry.strip() for entry in annotations[key].split(",", MOST)]
    if not any(entries):
        problems.append(Problem(field(key), "must name at least one; without a wish, leave it out"))
        return ()
    if count > MOST:
        problems.append(Problem(field(key), f"may name at most {MOST}, not {count}"))
        return ()  # each would be compared with each of another list
    problems += (Problem(field(key), f"entry {i} is empty") for i, entry in enumerate(entries) if not entry)
    long = [i for i, entry in enumerate(entries) if len(entry) > LONGEST]
    if long:
        problems += (Problem(field(key), f"entry {i} has more than {LONGEST} characters") for i in long)
        return ()
    return tuple(dict.fromkeys(filter(None, entries)))


def contradictions(constraints: Constraints) -> Iterator[Problem]:
    """What the wishes want and exclude at the same time: for admission, which looks at a pod once.

    Where such a pod exists all the same, no card fits it. The lists are as long as a tenant likes, so that they are not
    compared model by model: excluded words are a part of wanted ones where they begin a tail of them, and of all tails
    in their order the first that can begin with them is found by bisection.
    """
    wanted: dict[str, str] = {}
    for model in constraints.models if constraints.excluded_models else ():
        words = _words(model)
        wanted.update((words[at:], model) for at, sign in enumerate(words[:-1]) if sign == " ")
    tails = sorted(wanted)
    for other in constraints.excluded_models:
        words = _words(other)
        at = bisect_left(tails, words)
        if words and at < len(tails) and tails[at].startswith(words):
            text = f"{other!r} excludes {wanted[tails[at]]!r}, which {CARD_MODELS} wants"
            yield Problem(field(EXCLUDE_CARD_MODELS), text)


def _group(annotations: Mapping[str, str], key: str, namespace: str, problems: list[Problem]) -> Group | None:
    name = annotations.get(key)
    if name is None:
        return None
    if _NAME.fullmatch(name):
        return Group(key.removeprefix(PREFIX), namespace, name)
    rule = "must be a name of 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
    problems.append(Problem(field(key), f"{rule}, not {name[:80]!r}"))
    return None
