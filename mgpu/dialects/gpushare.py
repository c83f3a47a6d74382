"""The dialect of Aliyun gpushare: a container requests memory of one card (docs/design/gpushare.md).

The resource `aliyun.com/gpu-mem`, the annotations and the environment variables state memory in the unit of the setting
`memoryUnit`. gpushare's own scheduler extender and device plugin read the same names and formats, so these must not
change. The processes call the dialect through `mgpu.dialects`; otherwise only code for gpushare's own interfaces
imports it.
"""

import json
import re
from collections.abc import Sequence

from mgpu.dialects.protocol import NodeResource, UnhealthyCardLists, unchanged
from mgpu.model.cards import GPU, Card
from mgpu.model.device_object import MAX_GPUS
from mgpu.model.errors import BadObject, Problem, Rule, raise_if_any
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, cards_by_index, peak
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Node, Pod, Stage
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, whole_number
from mgpu.model.raw_objects import annotation_path, parse_json_object
from mgpu.settings import Settings

NAME = "gpushare"
DEFAULT_CARD_POLICY = "bestfit"

MEMORY = "aliyun.com/gpu-mem"
COUNT = "aliyun.com/gpu-count"
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}

PREFIX = "ALIYUN_COM_GPU_MEM_"
INDEX = PREFIX + "IDX"
OF_CARD = PREFIX + "DEV"
OF_POD = PREFIX + "POD"
OF_CONTAINER = PREFIX + "CONTAINER"
ASSUME_TIME = PREFIX + "ASSUME_TIME"
ASSIGNED = PREFIX + "ASSIGNED"
UNIT = PREFIX + "UNIT"
"""The annotation with the unit of a record. mgpu adds it so that a change of `memoryUnit` does not change the bytes of
running pods."""
ALLOCATION = "scheduler.framework.gpushare.allocation"
_RECORD = frozenset((INDEX, OF_CARD, OF_POD, ASSUME_TIME, ASSIGNED, UNIT, ALLOCATION))

_MAX_MEMORY = MAX_QUANTITY // 1000
"""The most bytes that a container may request. Sums over the containers of a pod stay below 2^63, and no card has
nearly as many bytes."""

_CARD = re.compile(r"\d{1,9}", re.ASCII)
_UNITS = re.compile(r"\d{1,19}", re.ASCII)

RESOURCE_PREFIXES: tuple[str, ...] = (MEMORY, COUNT)
RESOURCES_FOLLOW_CARDS = False
REQUEST_ANNOTATIONS: tuple[str, ...] = (UNIT,)
REQUEST_LABELS: tuple[str, ...] = ()
RECORD_KEYS: tuple[str, ...] = tuple(sorted(_RECORD))
ACKNOWLEDGEMENTS: frozenset[str] = frozenset((ASSIGNED,))
UNHEALTHY_CARD_LISTS = UnhealthyCardLists("kube-system", "unhealthy-gpu-")

normalized = unchanged


def enabled(settings: Settings) -> bool:
    return settings.dialects.gpushare.enabled


def card_policy(settings: Settings) -> str | None:
    return settings.dialects.gpushare.policy


def owns_resource(name: str) -> bool:
    return name in (MEMORY, COUNT)


def unit_bytes(settings: Settings) -> int:
    """Return the bytes of one `gpu-mem`."""
    return UNITS[settings.dialects.gpushare.memory_unit]


def _unit_of(pod: Pod, settings: Settings) -> int:
    """Return the bytes of one `gpu-mem` of this pod. A bound pod keeps the unit that its record names."""
    recorded = UNITS.get(pod.annotations.get(UNIT, "")) if pod.node else None
    return recorded or unit_bytes(settings)


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    of_one = _unit_of(pod, settings)
    requests: list[ContainerRequest] = []
    problems: list[Problem] = []
    for container in pod.containers:
        units = _read_units(container, settings.dialects.gpushare.min_gpu_memory * UNITS["MiB"], of_one, problems)
        if units:
            requests.append(ContainerRequest(container.name, memory=units * of_one, stage=container.stage))
    raise_if_any(problems)
    return GpuRequest(NAME, tuple(requests)) if requests else None


def write_placement(
    pod: Pod,
    request: GpuRequest,
    placement: Placement,
    cards: Sequence[Card],
    settings: Settings,
    now_ns: int,
) -> dict[str, str]:
    units = _units(pod)
    chosen = {c.container: placement.cards(c.container)[0] for c in request.containers}
    # gpushare's own tools read one card per pod. Init containers end early, so the first app or sidecar container
    # determines the card. Without such a container, the first init container does.
    longest = max(request.containers, key=lambda c: c.stage is not Stage.INIT).container
    return {
        INDEX: str(chosen[longest]),
        OF_CARD: str(cards_by_index(cards)[chosen[longest]].memory // _unit_of(pod, settings)),
        OF_POD: str(_peak_units(pod)),
        ASSUME_TIME: str(now_ns),
        ASSIGNED: "false",
        UNIT: next(name for name, of_one in UNITS.items() if of_one == _unit_of(pod, settings)),
        ALLOCATION: json.dumps(
            {name: {str(card): units[name]} for name, card in chosen.items()}, separators=(",", ":")
        ),
    }


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    if INDEX not in pod.annotations and ALLOCATION not in pod.annotations:
        return None
    problems = _unparsable(pod) or _unequal(pod)
    recorded = _allocation(pod, problems)
    raise_if_any(problems)
    index = int(pod.annotations[INDEX]) if INDEX in pod.annotations else None
    if index is not None and recorded and index not in recorded.values():
        text = f"is {index}, while {ALLOCATION} gives card {', '.join(map(str, sorted(set(recorded.values()))))}"
        raise BadObject([Problem(annotation_path(INDEX), text)])
    shares = []
    for one in request.containers:
        # Other writers record only one card for the pod, or only the cards of the app containers.
        card = recorded.get(one.container, index if one.stage is not Stage.APP or not recorded else None)
        if card is None:
            problems.append(Problem(annotation_path(ALLOCATION), f"names no card for container {one.container!r}"))
        else:
            shares.append(Share(one.container, card, memory=one.memory, stage=one.stage))
    raise_if_any(problems)
    return tuple(shares)


def owns_annotation(key: str) -> bool:
    return key in _RECORD


def acknowledgement(pod: Pod) -> dict[str, str]:
    """Return the annotation that acknowledges the record; {} if there is no record, or if it is acknowledged.

    gpushare's own tools count pods without an acknowledgement as pending.
    """
    is_missing = INDEX in pod.annotations and pod.annotations.get(ASSIGNED) != "true"
    return {ASSIGNED: "true"} if is_missing else {}


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    if not enabled(settings):
        return ()
    in_gib = settings.dialects.gpushare.memory_unit == "GiB"
    gpus = [card for card in cards if card.type == GPU]
    memory = tuple((card.index, card.memory // unit_bytes(settings)) for card in gpus)
    return (
        # The kubelet cannot handle one device id per MiB, so in MiB the resource is a number in the node's status.
        NodeResource(MEMORY, memory, as_ids=in_gib, follows_settings=True, of_memory=True),
        NodeResource(COUNT, tuple((card.index, 1) for card in gpus), as_ids=False),
    )


def card_units(node: Node) -> tuple[int, int] | None:
    """Return the number of cards of a node and the units of each card, according to its `gpu-count` and `gpu-mem`.

    Returns None if one of these resources is missing, or if the two cannot describe equal cards.
    """
    try:
        units = whole_number(node.capacity.get(MEMORY, "0"))
        count = whole_number(node.capacity.get(COUNT, "0"))
    except QuantityError:
        return None
    return (count, units // count) if 0 < count <= min(units, MAX_GPUS) else None


def cards_from_capacity(node: Node, settings: Settings) -> tuple[Card, ...]:
    """Return equal cards with invented UUIDs, since gpushare's own device plugin reports only numbers."""
    count, units = card_units(node) or (0, 0)
    memory = units * unit_bytes(settings)
    return tuple(Card(i, f"GPU-{node.name}-{i}", "", memory) for i in range(count)) if memory <= _MAX_MEMORY else ()


def environment(pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]) -> dict[str, str]:  # noqa: ARG001
    units = _units(pod)[request.container]
    of_one = request.memory // units  # the bytes of one unit when the request was read
    return {
        INDEX: ",".join(str(card.index) for card in cards),
        OF_POD: str(_peak_units(pod)),
        OF_CONTAINER: str(units),
        OF_CARD: ",".join(str(card.memory // of_one) for card in cards),
    }


def held_units(held: int, card: Card, of_one: int) -> int:
    """Return the held bytes of a card in units, rounded up.

    The result exceeds the units of the card only if more bytes are held than the card has.

    Args:
        of_one: the bytes of one unit.
    """
    units = -(-held // of_one)
    return min(units, card.memory // of_one) if held <= card.memory else units


def _read_units(container: Container, least: int, of_one: int, problems: list[Problem]) -> int | None:
    """Return the units that a container requests; None if it requests none or an invalid amount.

    Args:
        least: the smallest allowed share in bytes.
        of_one: the bytes of one unit.
    """
    memory = container.requested(MEMORY)
    count = container.requested(COUNT)
    if count and memory is None:
        text = f"has no effect alone; request {MEMORY}, which is memory of one card"
        problems.append(Problem(count.path, text, Rule.RESOURCE_COMBINATION))
    elif count and count.positive(problems, most=MAX_QUANTITY) not in (None, 1):
        text = f"must be 1 or left out: {MEMORY} is memory of one card"
        problems.append(Problem(count.path, text, Rule.RESOURCE_COMBINATION))
    if memory is None:
        return None
    units = memory.positive(problems, most=_MAX_MEMORY // of_one, limit="any card has")
    if units is not None and units * of_one < least:
        name = next(name for name, size in UNITS.items() if size == of_one)
        text = f"must be at least {-(-least // of_one)} ({name}) for a share of a card, not {memory.text}"
        problems.append(Problem(memory.path, text, Rule.MEMORY_MINIMUM))
    return units


def _units(pod: Pod) -> dict[str, int]:
    """Return the units of each container that requests some. The request must be valid."""
    return {c.name: whole_number(amount.text) for c in pod.containers if (amount := c.requested(MEMORY))}


def _peak_units(pod: Pod) -> int:
    """Return the most units that the pod needs at any time."""
    units = _units(pod)
    return peak((c.stage, Amount(memory=units[c.name])) for c in pod.containers if c.name in units).memory


def _unparsable(pod: Pod) -> list[Problem]:
    return [
        Problem(annotation_path(key), f"must be {what}, not {pod.annotations[key][:40]!r}")
        for key, form, what in (
            (INDEX, _CARD, "a card index"),
            (OF_CARD, _UNITS, "a number"),
            (OF_POD, _UNITS, "a number"),
        )
        if key in pod.annotations and not form.fullmatch(pod.annotations[key])
    ]


def _unequal(pod: Pod) -> list[Problem]:
    """Return a problem if the recorded total differs from the pod's request.

    mgpu records the most units that the pod needs at any time. gpushare records the sum over the pod's app containers.
    """
    if OF_POD not in pod.annotations:
        return []
    recorded = int(pod.annotations[OF_POD])
    units = _units(pod)
    requested = {_peak_units(pod), sum(units.get(container.name, 0) for container in pod.app_containers)}
    if recorded in requested:
        return []
    return [
        Problem(
            annotation_path(OF_POD),
            f"records {recorded} units, but the pod requests {' or '.join(map(str, sorted(requested)))}",
        )
    ]


def _allocation(pod: Pod, problems: list[Problem]) -> dict[str, int]:
    """Return the card of each container in the annotation `ALLOCATION`; {} if it is missing or not a JSON object.

    mgpu identifies containers in the annotation by their names, and other writers by their positions in
    `spec.containers`.

    Args:
        problems: the list to which problems with the annotation are appended.
    """
    text = pod.annotations.get(ALLOCATION)
    if text is None:
        return {}
    try:
        table = parse_json_object(text, annotation_path(ALLOCATION))
    except BadObject as error:
        problems += error.problems
        return {}
    names = {c.name for c in pod.containers}
    units = _units(pod)
    found: dict[str, int] = {}
    positions = {str(c.position): c.name for c in pod.app_containers}
    for key, row in table.items():
        name = str(key if key in names else positions.get(key, key))
        card = _one_card(row, units[name]) if name in units else "does not request GPU memory"
        if isinstance(card, str):
            problems.append(Problem(annotation_path(ALLOCATION), f"container {name[:63]!r}: {card}"))
        else:
            found[name] = card
    return found


def _one_card(row: object, units: int) -> int | str:
    """Return the index of the card of a container that requests `units`, or the problem with its entry."""
    if not isinstance(row, dict) or len(row) != 1:
        return 'must name one card, as in {"0": 4}'
    ((card, recorded),) = row.items()
    if not _CARD.fullmatch(card):
        return f"{card[:40]!r} is not a card index"
    if type(recorded) is not int or recorded != units:
        return f"records {str(recorded)[:40]!r} units, but the container requests {units}"
    return int(card)
