"""Slices of cards that are made when a pod needs them (seeds/dynamic-mps-mig-slice.md; spec page slices.md).

`nvidia.com/mig-2g.20gb: n` are n MIG instances, `nvidia.com/gpu-4gb: 1` is one share under MPS. A slice is a device of
its own type (`mgpu.model.slice_names`); a record names places, since instances are made anew after a reboot.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from mgpu.dialects.protocol import NodeResource
from mgpu.dialects.registry import vocabulary_of
from mgpu.model.cards import WHOLE_CORE, Card
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Requirement
from mgpu.model.ledger import Share, share_of
from mgpu.model.mig import canonical
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Container, Pod
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.model.slice_names import (
    MIG,
    MPS,
    PLACES,
    RESOURCE_PREFIX,
    is_mps,
    is_slice,
    mode_of,
    place_of,
    resource_of,
    slice_named,
)
from mgpu.settings import Settings

NAME = "slices"
DEFAULT_CARD_POLICY = "minor"

GIVEN = "mgpu.io/slices-given"
"""`{"a":{"mig-2g.20gb":["0:4"]}}`: by container and type the places, card:start, of the slices that it has."""

MOST = 1024
"""Instances of one container; no node has more."""

_PATH = f"metadata.annotations[{GIVEN}]"
_PLACE = re.compile(r"(\d{1,3}):(\d{1,2})", re.ASCII)
_EXAMPLES = "nvidia.com/mig-2g.20gb, nvidia.com/mig-1g.10gb.me (MIG) or nvidia.com/gpu-4gb (MPS, whole GiB)"

ASK_ANNOTATIONS: tuple[str, ...] = ()
RECORD_KEYS: tuple[str, ...] = (GIVEN,)


def enabled(settings: Settings) -> bool:
    return settings.dialects.slices.enabled


def card_policy(settings: Settings) -> str | None:  # noqa: ARG001
    """Slices are taken in the order of their minors, whatever the policy for cards is."""
    return DEFAULT_CARD_POLICY


def asked_by(container: Container) -> tuple[str, ...]:
    """The slice resources that a container asks for, ascending."""
    named = {name for name in (*container.requests, *container.limits) if vocabulary_of(name) == NAME}
    return tuple(sorted(filter(container.asked, named)))


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:  # noqa: ARG001
    asks: list[ContainerRequest] = []
    problems: list[Problem] = []
    for container in pod.containers:
        try:
            asks += _container_requests(container)
        except BadObject as error:
            problems += error.problems
    problems += _both_ways(pod)
    if problems:
        raise BadObject(problems)
    if not asks:
        return None
    mode = MPS if is_mps(asks[0].type) else MIG
    cut = Requirement(LABEL, (mode,), f"node label {LABEL} is {{found}}, not {mode}")
    return GpuRequest(NAME, (), requirements=(cut,), others=tuple(sorted(asks, key=lambda request: request.type)))


def write_placement(
    pod: Pod,  # noqa: ARG001
    request: GpuRequest,
    placement: Placement,
    cards: Sequence[Card],  # noqa: ARG001
    settings: Settings,  # noqa: ARG001
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    given: dict[str, dict[str, list[str]]] = {}
    for wanted in request.others:
        places = [place_of(index) for index in placement.cards(wanted.container, wanted.type)]
        given.setdefault(wanted.container, {})[wanted.type] = [f"{card}:{start}" for card, start in places]
    return {GIVEN: json.dumps(given, separators=(",", ":"))}


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    text = pod.annotations.get(GIVEN)
    if text is None:
        return None
    table = _table(text)
    shares: list[Share] = []
    problems: list[Problem] = []
    for wanted in request.others:
        row = table.get(wanted.container)
        indexes, why = _indexes(row.get(wanted.type) if isinstance(row, dict) else None, wanted.cards)
        if why:
            problems.append(Problem(_PATH, f"{wanted.type} of container {wanted.container!r} {why}"))
        shares += (share_of(wanted, index) for index in indexes)
    asked = {(wanted.container, wanted.type) for wanted in request.others}
    named = ((name, type) for name, row in table.items() for type in (row if isinstance(row, dict) else (row,)))
    problems += (
        Problem(_PATH, f"gives {str(type)[:40]!r} to container {name[:63]!r}, which does not ask for it")
        for name, type in named
        if (name, type) not in asked
    )
    if problems:
        raise BadObject(problems)
    return tuple(shares)


def owns_annotation(key: str) -> bool:
    return key == GIVEN


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    """One for each type of slices that there is: which ones a node serves changes as its cards are cut."""
    if not enabled(settings):
        return ()
    slices: dict[str, list[int]] = {}
    for card in cards:
        if is_slice(card.type):
            slices.setdefault(card.type, []).append(card.index)
    return tuple(
        NodeResource(RESOURCE_PREFIX + type, tuple((index, 1) for index in slices[type]), as_ids=True, type=type)
        for type in sorted(slices)
    )


def environment(pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]) -> dict[str, str]:  # noqa: ARG001
    """What is seen of a slice is, under MIG, the instance, and under MPS the card that it is a share of.

    MGPU_CARDS: those that they are on. MGPU_CORE_PERCENT: of a card, per slice; of slices that differ, the smallest.
    """
    parents = {gpu.index: gpu.uuid for gpu in gpus}
    on = sorted({place_of(card.index)[0] for card in cards})
    shown = {
        "MGPU_CARDS": ",".join(map(str, on)),
        "MGPU_CORE_PERCENT": f"{min((card.core for card in cards), default=0) * 100 / WHOLE_CORE:g}",
        "MGPU_SLICES": ",".join(_slice(card.type) for card in cards),
    }
    if any(is_mps(card.type) for card in cards):
        shown["NVIDIA_VISIBLE_DEVICES"] = ",".join(parents[index] for index in on if index in parents)
    return shown


def _slice(type: str) -> str:
    return slice_named(RESOURCE_PREFIX + type) or type


def _container_requests(container: Container) -> Iterator[ContainerRequest]:
    """The asks of one container, one per type. Raises BadObject."""
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    for resource in asked_by(container):
        text, path = container.asked(resource) or ("", "")
        why = _misnamed(resource)
        if not why:
            counts[resource], why = _count(text)
        if why:
            problems.append(Problem(path, why))
    shares = [name for name in counts if mode_of(slice_named(name) or "") == MPS]
    if sum(counts[name] for name in shares) > 1:
        path = (container.asked(shares[-1]) or ("", ""))[1]
        rule = "a container gets one slice of a card at most under MPS (failRequestsGreaterThanOne)"
        problems.append(Problem(path, f"{rule}, this one asks for {sum(counts[name] for name in shares)}"))
    if problems:
        raise BadObject(problems)
    for resource, count in counts.items():
        type = resource.removeprefix(RESOURCE_PREFIX)
        yield ContainerRequest(container.name, count, WHOLE_CORE, whole=True, stage=container.stage, type=type)


def _misnamed(resource: str) -> str:
    """What is wrong with a name; "": nothing."""
    name = slice_named(resource)
    if name is None:
        return f"is no slice; ask for one such as {_EXAMPLES}"
    return "" if canonical(name) == name else f"is called {resource_of(canonical(name))} here"


def _count(text: str) -> tuple[int, str]:
    """The amount, and what is wrong with it ("": nothing)."""
    try:
        number = whole_number(text)
    except QuantityError as error:
        return 0, str(error)
    if number <= 0:
        return 0, f"must be greater than 0, not {text}"
    return (0, f"{text} is more than any node has") if number > MOST else (number, "")


def _both_ways(pod: Pod) -> Iterator[Problem]:
    """A problem at the first use of the second way of cutting cards: no node is cut both ways."""
    first = ""
    for container in pod.containers:
        for resource in asked_by(container):
            name = slice_named(resource)
            mode = mode_of(name) if name else first
            first = first or mode
            if mode != first:
                text = f"is cut by {mode.upper()}, while the pod already asks for slices of {first.upper()}"
                path = (container.asked(resource) or ("", ""))[1]
                yield Problem(path, f"{text}; a node's cards are cut one way, so a pod uses one")
                return


def _table(text: str) -> dict[str, object]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise BadObject([Problem(_PATH, 'must be an object such as {"container":{"mig-2g.20gb":["0:4"]}}')])
    return table


def _indexes(places: object, wanted: int) -> tuple[Iterable[int], str]:
    """The devices that these places are, or why the record does not say."""
    if not isinstance(places, list):
        return (), "is missing"
    found: list[int] = []
    for place in places:
        match = _PLACE.fullmatch(place) if isinstance(place, str) else None
        if match is None:
            return (), f"has {str(place)[:40]!r}, which is no place such as 0:4 (card:start)"
        found.append(int(match[1]) * PLACES + int(match[2]))
    if len(set(found)) != len(found):
        return (), "names a place twice"
    if len(found) != wanted:
        return (), f"names {len(found)} place{'' if len(found) == 1 else 's'}, the container asks for {wanted}"
    return found, ""
