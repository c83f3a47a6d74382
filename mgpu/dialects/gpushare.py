"""Aliyun gpushare (seeds/aliyun-gpushare.md; spec page gpushare.md).

A container asks for memory of one card, counted in the unit of the setting `memoryUnit`; annotations and environment
count in the same unit.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import GPU, Card
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, by_index, peak
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, Stage
from mgpu.model.quantities import MAX, QuantityError, whole_number
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
"""Ours: what the units of a record are, so that a change of `memoryUnit` leaves running pods their bytes."""
ALLOCATION = "scheduler.framework.gpushare.allocation"
_RECORD = frozenset((INDEX, OF_CARD, OF_POD, ASSUME_TIME, ASSIGNED, UNIT, ALLOCATION))

UNHEALTHY_NAMESPACE = "kube-system"
UNHEALTHY_PREFIX = "unhealthy-gpu-"

_MOST = MAX // 1000
"""Bytes of one container: far beyond any card, and sums over containers stay within 2^63."""

_CARD = re.compile(r"\d{1,9}", re.ASCII)
_UNITS = re.compile(r"\d{1,19}", re.ASCII)

ASK_ANNOTATIONS: tuple[str, ...] = (UNIT,)
RECORD_KEYS: tuple[str, ...] = tuple(sorted(_RECORD))


def enabled(settings: Settings) -> bool:
    return settings.dialects.gpushare.enabled


def card_policy(settings: Settings) -> str | None:
    return settings.dialects.gpushare.policy


def unit(settings: Settings) -> int:
    """Bytes of one `gpu-mem`."""
    return UNITS[settings.dialects.gpushare.memory_unit]


def _unit_of(pod: Pod, settings: Settings) -> int:
    """The same for this pod, which may have got its cards under another setting."""
    recorded = UNITS.get(pod.annotations.get(UNIT, "")) if pod.node else None
    return recorded or unit(settings)


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    of_one = _unit_of(pod, settings)
    requests: list[ContainerRequest] = []
    problems: list[Problem] = []
    for container in pod.containers:
        units, broken = _asked(container, settings.dialects.gpushare.min_gpu_memory * UNITS["MiB"], of_one)
        problems += broken
        if units:
            requests.append(ContainerRequest(container.name, memory=units * of_one, stage=container.stage))
    if problems:
        raise BadObject(problems)
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
    # The peer's own readers know one card per pod: that of what runs longest.
    longest = max(request.containers, key=lambda c: c.stage is not Stage.INIT).container
    return {
        INDEX: str(chosen[longest]),
        OF_CARD: str(by_index(cards)[chosen[longest]].memory // _unit_of(pod, settings)),
        OF_POD: str(_at_once(pod)),
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
    if problems:
        raise BadObject(problems)
    index = int(pod.annotations[INDEX]) if INDEX in pod.annotations else None
    if index is not None and recorded and index not in recorded.values():
        text = f"is {index}, while {ALLOCATION} gives card {', '.join(map(str, sorted(set(recorded.values()))))}"
        raise BadObject([Problem(_path(INDEX), text)])
    shares = []
    for wanted in request.containers:
        # Other writers record one card for the pod, or app containers alone.
        card = recorded.get(wanted.container, index if wanted.stage is not Stage.APP or not recorded else None)
        if card is None:
            problems.append(Problem(_path(ALLOCATION), f"names no card for container {wanted.container!r}"))
        else:
            shares.append(Share(wanted.container, card, memory=wanted.memory, stage=wanted.stage))
    if problems:
        raise BadObject(problems)
    return tuple(shares)


def owns_annotation(key: str) -> bool:
    return key in _RECORD


def assigned(pod: Pod) -> dict[str, str]:
    """What the node writes once it has given the card out; {}: nothing, there is no record or it says so already."""
    given = INDEX in pod.annotations and pod.annotations.get(ASSIGNED) != "true"
    return {ASSIGNED: "true"} if given else {}


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    if not enabled(settings):
        return ()
    in_gib = settings.dialects.gpushare.memory_unit == "GiB"
    gpus = [card for card in cards if card.type == GPU]
    memory = tuple((card.index, card.memory // unit(settings)) for card in gpus)
    return (
        NodeResource(MEMORY, memory, as_ids=in_gib),
        NodeResource(COUNT, tuple((card.index, 1) for card in gpus), as_ids=False),
    )


def environment(pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]) -> dict[str, str]:  # noqa: ARG001
    units = _units(pod)[request.container]
    of_one = request.memory // units  # as it was when the ask was read
    return {
        INDEX: ",".join(str(card.index) for card in cards),
        OF_POD: str(_at_once(pod)),
        OF_CONTAINER: str(units),
        OF_CARD: ",".join(str(card.memory // of_one) for card in cards),
    }


def units_of(held: int, card: Card, of_one: int) -> int:
    """Bytes that are held of a card in units, rounded up; all of a card is what it has, a rest of a unit or not."""
    units = -(-held // of_one)
    return min(units, card.memory // of_one) if held <= card.memory else units


def node_of_unhealthy(raw: Mapping[str, Any]) -> str | None:
    """The node whose unhealthy cards this ConfigMap lists; None: it is about something else."""
    meta = raw["metadata"]
    node = str(meta["name"]).removeprefix(UNHEALTHY_PREFIX)
    return node if meta.get("namespace") == UNHEALTHY_NAMESPACE and node != meta["name"] else None


def unhealthy_cards(raw: Mapping[str, Any]) -> frozenset[int]:
    """The indexes that a ConfigMap `unhealthy-gpu-<node>` lists. Raises BadObject: a list is taken whole or not at all.

    As the peer has it: `gpus: "0,1"`; nothing listed is nothing unhealthy.
    """
    data = raw.get("data")
    text = data.get("gpus", "") if isinstance(data, dict) else ""
    if not isinstance(text, str):
        raise BadObject([Problem("data.gpus", "must be a text")])
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    wrong = [part for part in parts if not _CARD.fullmatch(part)]
    if wrong:
        raise BadObject([Problem("data.gpus", f"{wrong[0][:40]!r} is no card index; the list is like 0,1")])
    return frozenset(map(int, parts))


def _asked(container: Container, least: int, of_one: int) -> tuple[int, Iterable[Problem]]:
    """Return the units that a container asks for (0: none), and what is wrong with that.

    least: the bytes that a share asks for at least. of_one: the bytes of a unit.
    """
    memory, count = container.asked(MEMORY), container.asked(COUNT)
    problems: list[Problem] = []
    if count and memory is None:
        problems.append(Problem(count[1], f"has no effect alone: ask for {MEMORY}, which is memory of one card"))
    elif count and _positive(count, problems) not in (None, 1):
        problems.append(Problem(count[1], f"must be 1 or left out: {MEMORY} is memory of one card"))
    units = _positive(memory, problems) if memory else None
    if memory and units and units > _MOST // of_one:
        problems.append(Problem(memory[1], f"{memory[0]} is more than any card has"))
    elif memory and units and units * of_one < least:
        unit = next(name for name, size in UNITS.items() if size == of_one)
        text = f"must be at least {-(-least // of_one)} ({unit}) for a share of a card, not {memory[0]}"
        problems.append(Problem(memory[1], text))
    return units or 0, problems


def _positive(asked: tuple[str, str], problems: list[Problem]) -> int | None:
    text, path = asked
    try:
        number = whole_number(text)
    except QuantityError as error:
        problems.append(Problem(path, str(error)))
        return None
    if number <= 0:
        problems.append(Problem(path, f"must be greater than 0, not {text}"))
        return None
    return number


def _units(pod: Pod) -> dict[str, int]:
    """By container, of those that ask; of a pod whose ask could be read."""
    return {c.name: whole_number(asked[0]) for c in pod.containers if (asked := c.asked(MEMORY))}


def _at_once(pod: Pod) -> int:
    """What the pod needs at its busiest moment: without init containers, the sum over its containers."""
    units = _units(pod)
    return peak((c.stage, Amount(memory=units[c.name])) for c in pod.containers if c.name in units).memory


def _path(key: str) -> str:
    return f"metadata.annotations[{key}]"


def _unparsable(pod: Pod) -> list[Problem]:
    """A number that is none was written by nobody who knows the card: nothing of such a record can be relied on."""
    return [
        Problem(_path(key), f"must be {what}, not {pod.annotations[key][:40]!r}")
        for key, form, what in (
            (INDEX, _CARD, "a card index"),
            (OF_CARD, _UNITS, "a number"),
            (OF_POD, _UNITS, "a number"),
        )
        if key in pod.annotations and not form.fullmatch(pod.annotations[key])
    ]


def _unequal(pod: Pod) -> list[Problem]:
    """A total that is not what the pod asks for: at its busiest moment, or, as the peer counts, over app containers."""
    if OF_POD not in pod.annotations:
        return []
    recorded, units = int(pod.annotations[OF_POD]), _units(pod)
    asked = {_at_once(pod), sum(units.get(container.name, 0) for container in pod.app_containers)}
    if recorded in asked:
        return []
    return [
        Problem(_path(OF_POD), f"records {recorded} units, the pod asks for {' or '.join(map(str, sorted(asked)))}")
    ]


def _allocation(pod: Pod, problems: list[Problem]) -> dict[str, int]:
    """Container → card, as the record per container has it; {} where there is none.

    Containers go by name, else by their position in `spec.containers`, as other writers of this annotation have it.
    """
    text = pod.annotations.get(ALLOCATION)
    if text is None:
        return {}
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        problems.append(Problem(_path(ALLOCATION), "must be an object of container → card → units"))
        return {}
    names, units = {c.name for c in pod.containers}, _units(pod)
    found: dict[str, int] = {}
    positions = {str(c.position): c.name for c in pod.app_containers}
    for key, row in table.items():
        name = str(key if key in names else positions.get(key, key))
        card, why = _one_card(row, units[name]) if name in units else (None, "does not ask for GPU memory")
        if card is None:
            problems.append(Problem(_path(ALLOCATION), f"container {name[:63]!r}: {why}"))
        else:
            found[name] = card
    return found


def _one_card(row: object, units: int) -> tuple[int | None, str]:
    """The card of a container that asks for `units`, or why the record does not say."""
    if not isinstance(row, dict) or len(row) != 1:
        return None, 'must name one card, as in {"0": 4}'
    ((card, given),) = row.items()
    if not _CARD.fullmatch(card):
        return None, f"{card[:40]!r} is no card index"
    if type(given) is not int or given != units:
        return None, f"records {str(given)[:40]!r} units, the container asks for {units}"
    return int(card), ""
