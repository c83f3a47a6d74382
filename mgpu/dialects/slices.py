"""The dialect of slices: MIG instances and MPS shares (docs/design/slices.md).

`nvidia.com/mig-2g.20gb: n` requests n MIG instances, and `nvidia.com/gpu-4gb: 1` requests one MPS share. If a pod needs
slices that do not exist, the scheduler plans them and the agent creates them. Each kind of slice is a device type of
its own (`mgpu.model.slice_names`). The allocation record must contain positions on cards, and not UUIDs, because a
reboot changes the UUIDs of MIG devices. The processes call the dialect through `mgpu.dialects`.
"""

import json
import re
from collections.abc import Iterator, Sequence

from mgpu.dialects.protocol import (
    NodeResource,
    no_cards_from_capacity,
    nothing_to_acknowledge,
    unchanged,
    unrequested_problems,
)
from mgpu.model.cards import WHOLE_CORE, Card
from mgpu.model.errors import BadObject, Problem, Rule, raise_if_any
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Requirement
from mgpu.model.ledger import Share, share_of
from mgpu.model.mig import canonical
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Container, Pod, RequestedAmount
from mgpu.model.raw_objects import annotation_path, parse_json_object
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
    slice_of_resource,
)
from mgpu.settings import Settings

NAME = "slices"
DEFAULT_CARD_POLICY = "minor"

GIVEN = "mgpu.io/slices-given"
"""The annotation with the allocation record: the positions (card:start) of the slices by container and type, such as
`{"a":{"mig-2g.20gb":["0:4"]}}`."""

MAX_INSTANCES = 1024
"""The most slices of one kind that a container may request. No node has more."""

_PATH = annotation_path(GIVEN)
_RESOURCE = re.compile(r"nvidia\.com/(gpu-\d+[A-Za-z]*|mig-.+)", re.ASCII)
"""The names of this vocabulary, including misspelt names, so that `read_request` can reject these."""
_PLACE = re.compile(r"(\d{1,3}):(\d{1,2})", re.ASCII)
_EXAMPLES = "nvidia.com/mig-2g.20gb, nvidia.com/mig-1g.10gb.me (MIG) or nvidia.com/gpu-4gb (MPS, whole GiB)"

RESOURCE_PREFIXES: tuple[str, ...] = ("nvidia.com/gpu-", "nvidia.com/mig-")
RESOURCES_FOLLOW_CARDS = True
REQUEST_ANNOTATIONS: tuple[str, ...] = ()
REQUEST_LABELS: tuple[str, ...] = ()
RECORD_KEYS: tuple[str, ...] = (GIVEN,)
ACKNOWLEDGEMENTS: frozenset[str] = frozenset()
UNHEALTHY_CARD_LISTS = None

normalized = unchanged
acknowledgement = nothing_to_acknowledge
cards_from_capacity = no_cards_from_capacity


def enabled(settings: Settings) -> bool:
    return settings.dialects.slices.enabled


def card_policy(settings: Settings) -> str | None:  # noqa: ARG001
    """Return the policy for slices, which takes slices in the order of their minors. No setting changes it."""
    return DEFAULT_CARD_POLICY


def owns_resource(name: str) -> bool:
    return _RESOURCE.fullmatch(name) is not None


def _amounts(container: Container) -> dict[str, RequestedAmount]:
    names = sorted({name for name in (*container.requests, *container.limits) if owns_resource(name)})
    return {name: amount for name in names if (amount := container.requested(name))}


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:  # noqa: ARG001
    requests: list[ContainerRequest] = []
    problems: list[Problem] = []
    for container in pod.containers:
        try:
            requests += _container_requests(container)
        except BadObject as error:
            problems += error.problems
    problems += _mixed_modes(pod)
    raise_if_any(problems)
    if not requests:
        return None
    mode = MPS if is_mps(requests[0].type) else MIG
    partitioned = Requirement(LABEL, (mode,), f"node label {LABEL} is {{found}}, not {mode}")
    in_order = tuple(sorted(requests, key=lambda request: request.type))
    return GpuRequest(NAME, (), requirements=(partitioned,), others=in_order)


def write_placement(
    pod: Pod,  # noqa: ARG001
    request: GpuRequest,
    placement: Placement,
    cards: Sequence[Card],  # noqa: ARG001
    settings: Settings,  # noqa: ARG001
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    record: dict[str, dict[str, list[str]]] = {}
    for one in request.others:
        places = [place_of(index) for index in placement.cards(one.container, one.type)]
        record.setdefault(one.container, {})[one.type] = [f"{card}:{start}" for card, start in places]
    return {GIVEN: json.dumps(record, separators=(",", ":"))}


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    text = pod.annotations.get(GIVEN)
    if text is None:
        return None
    table = parse_json_object(text, _PATH)
    shares: list[Share] = []
    problems: list[Problem] = []
    for one in request.others:
        row = table.get(one.container)
        indexes = _indexes(row.get(one.type) if isinstance(row, dict) else None, one.cards)
        if isinstance(indexes, str):
            problems.append(Problem(_PATH, f"{one.type} of container {one.container!r} {indexes}"))
        else:
            shares += (share_of(one, index) for index in indexes)
    raise_if_any([*problems, *unrequested_problems(request.others, table, _PATH)])
    return tuple(shares)


def owns_annotation(key: str) -> bool:
    return key == GIVEN


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
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
    """Return the variables for slices.

    A container with MIG instances sees the instances, and a container with an MPS share sees the card of the share.
    `MGPU_CARDS` lists the indexes of the cards of the slices. `MGPU_CORE_PERCENT` is the compute of the slice with the
    least compute, in percent of a card.
    """
    parents = {gpu.index: gpu.uuid for gpu in gpus}
    on = sorted({place_of(card.index)[0] for card in cards})
    variables = {
        "MGPU_CARDS": ",".join(map(str, on)),
        "MGPU_CORE_PERCENT": f"{min((card.core for card in cards), default=0) * 100 / WHOLE_CORE:g}",
        "MGPU_SLICES": ",".join(_slice(card.type) for card in cards),
    }
    if any(is_mps(card.type) for card in cards):
        variables["NVIDIA_VISIBLE_DEVICES"] = ",".join(parents[index] for index in on if index in parents)
    return variables


def _slice(type: str) -> str:
    return slice_of_resource(RESOURCE_PREFIX + type) or type


def _container_requests(container: Container) -> Iterator[ContainerRequest]:
    """Yield the requests of one container, one for each kind of slice. Raises BadObject."""
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    amounts = _amounts(container)
    for resource, amount in amounts.items():
        misnamed = _misnamed(resource)
        if misnamed:
            problems.append(Problem(amount.path, misnamed, Rule.RESOURCE_NAME))
        elif (count := amount.positive(problems, most=MAX_INSTANCES)) is not None:
            counts[resource] = count
    shares = [name for name in counts if mode_of(slice_of_resource(name) or "") == MPS]
    total = sum(counts[name] for name in shares)
    if total > 1:
        rule = "a container may request only one MPS share (failRequestsGreaterThanOne)"
        problems.append(Problem(amounts[shares[-1]].path, f"{rule}; this one requests {total}", Rule.TOO_MUCH))
    raise_if_any(problems)
    for resource, count in counts.items():
        type = resource.removeprefix(RESOURCE_PREFIX)
        yield ContainerRequest(container.name, count, WHOLE_CORE, whole=True, stage=container.stage, type=type)


def _misnamed(resource: str) -> str | None:
    """Return the problem with the name of a resource of slices, or None."""
    name = slice_of_resource(resource)
    if name is None:
        return f"is not a slice; request one such as {_EXAMPLES}"
    own = canonical(name)
    return None if own == name else f"is not the name that nodes report; request {resource_of(own)}"


def _mixed_modes(pod: Pod) -> Iterator[Problem]:
    """Yield a problem at the first slice of a second partitioning mode, since no node has both MIG and MPS slices."""
    first: str | None = None
    for container in pod.containers:
        for resource, amount in _amounts(container).items():
            name = slice_of_resource(resource)
            mode = mode_of(name) if name else first
            first = first or mode
            if first and mode and mode != first:
                text = f"is a slice of {mode.upper()}, while the pod already requests slices of {first.upper()}"
                rule = "no node has slices of both"
                yield Problem(amount.path, f"{text}; {rule}", Rule.ONE_PARTITIONING_MODE)
                return


def _indexes(places: object, count: int) -> list[int] | str:
    """Return the indexes of the slices at these positions, or the problem with the list."""
    if not isinstance(places, list):
        return "is missing"
    found: list[int] = []
    for place in places:
        match = _PLACE.fullmatch(place) if isinstance(place, str) else None
        if match is None:
            return f"has {str(place)[:40]!r}, which is not a position such as 0:4 (card:start)"
        found.append(int(match[1]) * PLACES + int(match[2]))
    if len(set(found)) != len(found):
        return "names a position twice"
    if len(found) != count:
        return f"names {len(found)} position{'' if len(found) == 1 else 's'}, but the container requests {count}"
    return found
