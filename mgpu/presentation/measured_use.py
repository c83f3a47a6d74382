"""Reads from the metrics of node agents what containers really use of their cards.

Everything else in this package shows what pods *hold*; this module is about what their processes *use*. `mgpu top`,
`mgpu inspect` and the web page show both (docs/usage.md). A node may be hostile, so the size of a page is limited
before it is parsed, each line is limited, and a number that cannot be right counts as not measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mgpu.model.quantities import format_core
from mgpu.model.usage_problems import EXPLANATIONS
from mgpu.presentation.card_views import NodeView
from mgpu.presentation.claim_views import claim_name

LARGEST_PAGE = 1 << 20
"""The most bytes of a page that are read. The page of a node with 8 cards and 20 pods on each has 0.2 MiB."""
_LONGEST_LINE = 1024
_MOST_LINES = 16_384
_MOST_BYTES = 1 << 50
"""The largest amount of memory that counts as measured."""
_MILLI = 1000
_CONTAINER_MEMORY = "mgpu_container_memory_used_bytes"
_CONTAINER_LIMIT = "mgpu_container_memory_limit_bytes"
_CONTAINER_SM = "mgpu_container_sm_utilization_ratio"
_CLAIM_MEMORY = "mgpu_claim_memory_used_bytes"
_CLAIM_SM = "mgpu_claim_sm_utilization_ratio"
_CARD_MEMORY = "mgpu_card_memory_in_use_bytes"
_CARD_SM = "mgpu_card_sm_utilization_ratio"
_OF_CONTAINERS = (_CONTAINER_MEMORY, _CONTAINER_LIMIT, _CONTAINER_SM)
_OF_CLAIMS = (_CLAIM_MEMORY, _CLAIM_SM)
_OF_CARDS = (_CARD_MEMORY, _CARD_SM)
_PROBLEM = "mgpu_usage_problem"
_NAMES = (*_OF_CONTAINERS, *_OF_CLAIMS, *_OF_CARDS, _PROBLEM)

_CardKey = tuple[int, str]
_ClaimKey = tuple[str, int, str]
_ContainerKey = tuple[str, str, int, str]


class Used(NamedTuple):
    """What is used of one card, each None if it is not measured.

    Attributes:
        core: the utilization of the card's SMs, in thousandths.
        memory: the memory in bytes.
    """

    core: int | None = None
    memory: int | None = None


NOT_MEASURED = Used()


@dataclass(frozen=True, slots=True)
class ContainerUse:
    """What one container uses of one card.

    Attributes:
        pod: the pod as `namespace/name`.
        index: the index of the card.
        limit: the memory of the container's share, in bytes; None if it is unknown.
    """

    pod: str
    container: str
    index: int
    uuid: str
    used: Used
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """What the containers of one ResourceClaim use of one card.

    Attributes:
        claim: the claim as `claim namespace/name`.
        index: the index of the card.
    """

    claim: str
    index: int
    uuid: str
    used: Used


@dataclass(frozen=True, slots=True)
class CardInUse:
    """What all processes together use of one card, in containers or not."""

    index: int
    uuid: str
    used: Used


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What an agent has measured on its node, all sorted by card.

    Attributes:
        problem: why not all use is known, as a clause; None if the agent reports no problem.
    """

    cards: tuple[CardInUse, ...] = ()
    containers: tuple[ContainerUse, ...] = ()
    problem: str | None = None
    claims: tuple[ClaimUse, ...] = ()


@dataclass(frozen=True, slots=True)
class UnknownUse:
    """The use of a node is not known. It must not be shown as 0."""

    reason: str


MeasuredUse = NodeUse | UnknownUse
ClusterUse = Mapping[str, MeasuredUse]
"""What is used of the cards, by node. Nodes that were not asked are missing."""
NO_AGENT = UnknownUse("there is no Pod of an agent")
NO_MEASUREMENTS = UnknownUse("the agent measures no use")


@dataclass(frozen=True, slots=True)
class UseOfCards:
    """What a node's cards and the pods on them use, by the cards of its `NodeView`.

    Attributes:
        cards: the use of each measured card, by index.
        pods: the use of each measured pod and claim on each card, by the index of the card and the name of the pod or
            claim.
    """

    cards: Mapping[int, Used]
    pods: Mapping[tuple[int, str], Used]

    def of_card(self, index: int) -> Used:
        return self.cards.get(index, NOT_MEASURED)

    def of_pod(self, index: int, pod: str) -> Used:
        return self.pods.get((index, pod), NOT_MEASURED)


def lines_about_use(page: bytes) -> str | UnknownUse:
    """Return the lines of an agent's page `/metrics` that say what is used, or why the page is not parsed."""
    if len(page) > LARGEST_PAGE:
        return UnknownUse(f"the metrics of the agent have more than {LARGEST_PAGE >> 20} MiB")
    try:
        lines = [line for line in page.decode().splitlines() if line.startswith(_NAMES)]
    except UnicodeDecodeError:
        return UnknownUse("the metrics of the agent are not text in UTF-8")
    if len(lines) > _MOST_LINES or any(len(line) > _LONGEST_LINE for line in lines):
        return UnknownUse("the metrics of the agent have too many or too long lines")
    return "\n".join(lines)


def read_use(page: bytes) -> MeasuredUse:
    """Return what an agent's page `/metrics` says about real use."""
    text = lines_about_use(page)
    if isinstance(text, UnknownUse):
        return text
    try:
        samples = _read_samples(text)
    except (ValueError, IndexError, KeyError) as error:
        # The parser raises IndexError for some malformed lines, and KeyError means that a label is missing.
        return UnknownUse(f"the metrics of the agent cannot be read: {str(error)[:100] or type(error).__name__}")
    problem = next((text for known, text in EXPLANATIONS.items() if known.value in samples.problems), None)
    if not samples.cards and not samples.containers and not samples.claims:
        return UnknownUse(problem) if problem else NO_MEASUREMENTS
    by_card = sorted(samples.containers.items(), key=lambda row: (row[0][2:], row[0]))
    claims = sorted(samples.claims.items(), key=lambda row: (row[0][1:], row[0]))
    return NodeUse(
        tuple(CardInUse(*key, _used(row, _CARD_SM, _CARD_MEMORY)) for key, row in sorted(samples.cards.items())),
        tuple(_container(key, row) for key, row in by_card),
        problem,
        tuple(ClaimUse(*key, _used(row, _CLAIM_SM, _CLAIM_MEMORY)) for key, row in claims),
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    """The values of each card, and of each container and claim on a card, by the names of the metrics.

    Attributes:
        problems: the problems that the agent reports.
    """

    cards: dict[_CardKey, dict[str, float]] = field(default_factory=dict)
    containers: dict[_ContainerKey, dict[str, float]] = field(default_factory=dict)
    claims: dict[_ClaimKey, dict[str, float]] = field(default_factory=dict)
    problems: set[str] = field(default_factory=set)


def _read_samples(lines: str) -> _Samples:
    """Return the values in the lines. Raises ValueError, IndexError or KeyError if a line is malformed."""
    # Only now, because it takes 20 ms, and not every command shows use.
    from prometheus_client.parser import text_string_to_metric_families

    found = _Samples()
    for metric in text_string_to_metric_families(lines):
        for sample in metric.samples:
            labels = sample.labels
            if sample.name in _OF_CARDS:
                found.cards.setdefault(_card_key(labels), {})[sample.name] = sample.value
            elif sample.name in _OF_CONTAINERS:
                pod = f"{labels['namespace']}/{labels['pod']}"
                key = (pod, labels["container"], *_card_key(labels))
                found.containers.setdefault(key, {})[sample.name] = sample.value
            elif sample.name in _OF_CLAIMS:
                claim = claim_name(f"{labels['namespace']}/{labels['claim']}")
                found.claims.setdefault((claim, *_card_key(labels)), {})[sample.name] = sample.value
            elif sample.name == _PROBLEM and sample.value:
                found.problems.add(labels["reason"])
    return found


def _card_key(labels: Mapping[str, str]) -> _CardKey:
    """Return the index and the UUID. Raises ValueError if the index is not a number."""
    return int(labels["index"]), labels["uuid"]


def _container(key: _ContainerKey, row: Mapping[str, float]) -> ContainerUse:
    return ContainerUse(*key, _used(row, _CONTAINER_SM, _CONTAINER_MEMORY), _memory(row.get(_CONTAINER_LIMIT)))


def _used(row: Mapping[str, float], sm: str, memory: str) -> Used:
    return Used(_core(row.get(sm)), _memory(row.get(memory)))


def _core(ratio: float | None) -> int | None:
    return None if ratio is None or not 0 <= ratio <= 1 else round(ratio * _MILLI)


def _memory(value: float | None) -> int | None:
    return None if value is None or not 0 <= value <= _MOST_BYTES else int(value)


def use_of_cards(node: NodeView, use: NodeUse) -> UseOfCards:
    """Return the use by the cards of the view. Cards are found by UUID, also by that of a MIG instance, or by index."""
    index_of = dict(_uuids(node))
    cards = {index_of.get(card.uuid, card.index): card.used for card in use.cards}
    pods: dict[tuple[int, str], Used] = {}
    for row in use.containers:
        key = index_of.get(row.uuid, row.index), row.pod
        pods[key] = add(pods.get(key, NOT_MEASURED), row.used)
    for one in use.claims:
        key = index_of.get(one.uuid, one.index), one.claim
        pods[key] = add(pods.get(key, NOT_MEASURED), one.used)
    return UseOfCards(cards, pods)


def _uuids(node: NodeView) -> Iterator[tuple[str, int]]:
    for view in node.cards:
        card = view.state.card
        yield card.uuid, card.index
        for part in view.slices:
            yield part.state.card.uuid, card.index


def add(one: Used, other: Used) -> Used:
    """Return the sum of what is measured, or not measured if nothing is."""
    return Used(_sum(one.core, other.core), _sum(one.memory, other.memory))


def _sum(one: int | None, other: int | None) -> int | None:
    return (one or 0) + (other or 0) if one is not None or other is not None else None


def describe_unknown(use: MeasuredUse) -> str:
    """Return what is not known, such as `use unknown: the agent is late`; "" if nothing is missing."""
    if isinstance(use, UnknownUse):
        return f"use unknown: {use.reason}"
    return f"use per pod unknown: {use.problem}" if use.problem else ""


def core_text(used: int | None, *others: int) -> str:
    """Return a text such as `12/50%`, what is used first; `?/50%` if that is not known."""
    rounded = used if used is None or used < 100 else round(used, -1)
    return _joined([None if rounded is None else format_core(rounded), *map(format_core, others)], "%")


def memory_text(used: int | None, *others: int) -> str:
    """Return a text such as `1.5/8 GiB`, what is used first, in the unit of the last amount."""
    size, unit = next((size, unit) for least, size, unit in _UNITS if others[-1] >= least)
    texts = [None if amount is None else _number(amount / size) for amount in (used, *others)]
    return _joined(texts, f" {unit}")


_UNITS = ((10 << 40, 1 << 40, "TiB"), (1 << 30, 1 << 30, "GiB"), (1 << 20, 1 << 20, "MiB"), (0, 1, "B"))
"""From which amount on which unit is used. Up to 10 TiB, numbers of GiB are easier to compare with those of a card."""


def _number(value: float) -> str:
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}".removesuffix(".0")


def _joined(texts: Sequence[str | None], unit: str) -> str:
    return "/".join("?" if text is None else text.removesuffix(unit) for text in texts) + unit
