"""Koordinator fine-grained devices (seeds/koordinator-fine-grained-device.md; spec page koordinator.md).

GPU in percent of cards (`gpu`, `gpu-core`, `gpu-memory-ratio`) and bytes (`gpu-memory`), in total over a container's
cards; whole cards as `nvidia.com/gpu`. Every other `koordinator.sh/<type>` is percent of devices of that type, whether
any node has such a device or not: types are an open set. Names that begin with `gpu` are never types, nor are those of
MIG instances.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from mgpu.dialects.koordinator_record import (
    ALLOCATED,
    PER_CONTAINER,
    Device,
    by_container,
    of_pod,
    path_of,
    read,
    write,
)
from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import GPU as GPU_TYPE
from mgpu.model.cards import WHOLE_CORE, WHOLE_RATIO, Card
from mgpu.model.errors import PROBLEMS, BadObject, Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, by_index, peak, whole_cards
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, is_none
from mgpu.model.quantities import MAX, QuantityError, quantity_of_bytes, whole_bytes, whole_number
from mgpu.settings import KoordinatorSettings, Settings

NAME = "koordinator"
DEFAULT_CARD_POLICY = "minor"

PREFIX = "koordinator.sh/"
GPU = PREFIX + "gpu"
CORE = PREFIX + "gpu-core"
MEMORY = PREFIX + "gpu-memory"
RATIO = PREFIX + "gpu-memory-ratio"
SHARED = PREFIX + "gpu.shared"
NVIDIA = "nvidia.com/gpu"

_LONGEST = 2 * len(RATIO)
"""Characters of a name that is close to one of ours."""
MIB = 1 << 20
MAX_DEVICES = 1024
MAX_MEMORY = MAX // 1000
"""Of one container, in bytes; no node has more."""
_COMBINATIONS = (
    (NVIDIA,),
    (GPU,),
    (MEMORY,),
    (RATIO,),
    (CORE, MEMORY),
    (CORE, RATIO),
    (SHARED, MEMORY),
    (SHARED, RATIO),
    (SHARED, CORE, MEMORY),
    (SHARED, CORE, RATIO),
)
_OF_GPU = (NVIDIA, GPU, SHARED, CORE, MEMORY, RATIO)
_VALID = frozenset(map(frozenset, _COMBINATIONS))
_ALLOWED = ", ".join("{" + ", ".join(name.removeprefix(PREFIX) for name in names) + "}" for names in _COMBINATIONS)
_TYPE = re.compile(r"(?!gpu|mig-\d+g\.)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)

ASK_ANNOTATIONS: tuple[str, ...] = ()
RECORD_KEYS: tuple[str, ...] = (ALLOCATED, PER_CONTAINER)


def enabled(settings: Settings) -> bool:
    return settings.dialects.koordinator.enabled


def card_policy(settings: Settings) -> str | None:
    return settings.dialects.koordinator.policy


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    found: list[ContainerRequest] = []
    problems: list[Problem] = []
    for container in pod.containers:
        try:
            hints = max(0, PROBLEMS - len(problems))
            found += _container_requests(container, settings.dialects.koordinator, hints)
        except BadObject as error:
            problems += error.problems
    if problems:
        raise BadObject(problems)
    of_gpu = tuple(request for request in found if request.type == GPU_TYPE)
    others = sorted((request for request in found if request.type != GPU_TYPE), key=lambda request: request.type)
    return GpuRequest(NAME, of_gpu, others=tuple(others)) if found else None


def write_placement(
    pod: Pod,  # noqa: ARG001
    request: GpuRequest,
    placement: Placement,
    cards: Sequence[Card],
    settings: Settings,  # noqa: ARG001
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    asks = (*request.containers, *request.others)
    devices: list[Device] = []
    for type in dict.fromkeys(a.type for a in asks):
        known = by_index(cards, type)
        chosen = [(a, i) for a in asks if a.type == type for i in placement.cards(a.container, type)]
        for index in sorted({i for _, i in chosen}):
            card = known[index]
            of_pod = peak((a.stage, a.takes(card)) for a, i in chosen if i == index)
            percent, memory, ratio = of_pod.core * WHOLE_RATIO // WHOLE_CORE, of_pod.memory, of_pod.ratio
            devices.append(Device(type, _minor(card), card.uuid, percent, memory, ratio))
    written = {ALLOCATED: write(devices)}
    if len({a.container for a in asks}) > 1:
        written[PER_CONTAINER] = _per_container(asks, placement, cards)
    return written


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    """What is recorded: by container, as mgpu does; else as Koordinator itself leaves it, one allocation for the pod.

    There every container of the pod that asks for a type may use all of the pod's devices of it; which holds how much
    is not known, so that the first one is said to hold all that the pod holds.
    """
    text, per_container = pod.annotations.get(ALLOCATED), pod.annotations.get(PER_CONTAINER)
    if text is None:
        if per_container is not None:
            raise BadObject([Problem(path_of(PER_CONTAINER), f"is a part of {ALLOCATED}, which is missing")])
        return None
    devices = read(text)
    asks = (*request.containers, *request.others)
    if per_container is not None:
        return tuple(by_container(asks, devices, per_container))
    return tuple(of_pod(asks, devices))


def owns_annotation(key: str) -> bool:
    return key in (ALLOCATED, PER_CONTAINER)


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    """Types other than GPU are numbers in node status: there is nothing that the node would give to a container."""
    if not enabled(settings):
        return ()
    gpus = [card for card in cards if card.type == GPU_TYPE]
    percent = tuple((card.index, 100) for card in gpus)
    others = {card.type: by_index(cards, card.type) for card in cards if card.type != GPU_TYPE}
    return (
        NodeResource(NVIDIA, tuple((card.index, 1) for card in gpus), as_ids=True),
        NodeResource(CORE, percent, as_ids=True),
        NodeResource(RATIO, percent, as_ids=True),
        NodeResource(MEMORY, tuple((card.index, card.memory) for card in gpus), as_ids=False),
        NodeResource(SHARED, percent, as_ids=False),
        *(NodeResource(PREFIX + t, tuple((i, 100) for i in others[t]), as_ids=False, type=t) for t in sorted(others)),
    )


def environment(pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]) -> dict[str, str]:  # noqa: ARG001
    """None: what Koordinator sets is `NVIDIA_VISIBLE_DEVICES`, which every container gets."""
    return {}


def translated(amounts: Mapping[str, str]) -> dict[str, str]:
    """A container's requests or limits, `koordinator.sh/gpu` in them replaced by the core and ratio that it stands for.

    Where it stands beside other names for GPU, or is no amount of it, it is left for the validation.
    """
    named = [name for name in _OF_GPU if name in amounts and not is_none(name, amounts[name])]
    if named != [GPU]:
        return dict(amounts)
    numbers, problems = _numbers({GPU: (amounts[GPU], "")})
    if problems or any(_broken(named, numbers)):
        return dict(amounts)
    of_gpu = {CORE: amounts[GPU], RATIO: amounts[GPU]}
    return {name: amount for name, amount in amounts.items() if name != GPU} | of_gpu


def _container_requests(container: Container, own: KoordinatorSettings, hints: int) -> Iterable[ContainerRequest]:
    """Return the asks of one container, one per type. Raises BadObject.

    hints: the number of wrong names for which a close name is looked up, which takes 50 µs each.
    """
    names = sorted({name for name in (*container.requests, *container.limits) if _is_own(name)})
    asked = {name: found for name in names if (found := container.asked(name))}
    if not asked:
        return ()
    strange = {name: "is no resource of a GPU" for name in asked if _is_strange(name)}
    strange |= {name: text + _close(name) for name, text in [*strange.items()][:hints]}
    numbers, problems = _numbers({name: found for name, found in asked.items() if name not in strange})
    problems += (Problem(asked[name][1], text) for name, text in strange.items())
    problems += (Problem(asked[name][1], text) for name, text in _broken(asked, numbers))
    if not problems:
        problems += (Problem(asked[name][1], text) for name, text in _too_little(numbers, own))
    if problems:
        raise BadObject(sorted(problems))
    return _requests_of(container, numbers)


def _is_own(name: str) -> bool:
    return name == NVIDIA or name.startswith(PREFIX)


def _is_strange(name: str) -> bool:
    """Whether no device of any type has this name."""
    return name not in _OF_GPU and not _TYPE.fullmatch(name.removeprefix(PREFIX))


def _close(name: str) -> str:
    """A hint at the resource that a name is meant to be, where one is close."""
    close = get_close_matches(name, _OF_GPU, n=1, cutoff=0.8) if len(name) <= _LONGEST else []
    return f"; did you mean {close[0]}?" if close else ""


def _numbers(asked: Mapping[str, tuple[str, str]]) -> tuple[dict[str, int], list[Problem]]:
    """The amounts that are in bounds, and what is wrong with the others."""
    numbers: dict[str, int] = {}
    problems: list[Problem] = []
    for name, (text, path) in asked.items():
        most = MAX_MEMORY if name == MEMORY else MAX_DEVICES * (1 if name in (NVIDIA, SHARED) else 100)
        try:
            number = whole_bytes(text) if name == MEMORY else whole_number(text)
        except QuantityError as error:
            problems.append(Problem(path, str(error)))
            continue
        if number <= 0:
            problems.append(Problem(path, f"must be greater than 0, not {text}"))
        elif number > most:
            problems.append(Problem(path, f"{text} is more than any node has"))
        else:
            numbers[name] = number
    return numbers, problems


def _broken(names: Collection[str], numbers: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (resource, message) for each rule that a container breaks by asking for `names` together.

    Source: docs/design/koordinator.md, "Resources".

    numbers: those of its amounts that are in bounds.
    """
    of_gpu = [name for name in _OF_GPU if name in names]
    known = not of_gpu or frozenset(of_gpu) in _VALID
    if not known:
        one = "cannot be asked for alone" if len(of_gpu) == 1 else f"cannot stand beside {' and '.join(of_gpu[1:])}"
        yield of_gpu[0], f"{one}; a container asks for one of {_ALLOWED}"
    free = (NVIDIA, MEMORY, SHARED, *((CORE, RATIO) if SHARED in names else ()))
    odd = [name for name, number in numbers.items() if name not in free and number > 100 and number % 100]
    for name in odd:
        yield name, f"above 100 must be a multiple of 100 (whole devices), not {numbers[name]}"
    if not known or not numbers.keys() >= {*of_gpu} or not {*odd}.isdisjoint(of_gpu):
        return
    cards = _cards(numbers)
    for name in (CORE, RATIO):
        if numbers.get(name, 0) % cards:
            yield name, f"must be divisible by the number of cards: {numbers[name]} over {cards} cards"
        elif numbers.get(name, 0) > 100 * cards:
            yield name, f"must be at most 100 per card: {numbers[name]} over {cards} card{'' if cards == 1 else 's'}"


def _too_little(numbers: Mapping[str, int], own: KoordinatorSettings) -> Iterator[tuple[str, str]]:
    """Yield each amount of a share that is below the least of the settings, with the rule that it breaks.

    A share of any size keeps whole-card pods off its cards, so the least amount is what lets a ResourceQuota bound
    the number of these cards (docs/quotas.md).
    """
    if not {GPU, MEMORY, RATIO} & numbers.keys():
        return
    cards = _cards(numbers)
    over = f"{cards} card{'' if cards == 1 else 's'}"
    least = own.min_gpu_memory * MIB
    if MEMORY in numbers and numbers[MEMORY] < least * cards:
        rule = f"must be at least {quantity_of_bytes(least)} per card, not {numbers[MEMORY]} bytes over {over}"
        yield MEMORY, f"{rule}; a number without a suffix is in bytes, and 8 GiB are written as 8Gi"
    for name in (GPU, RATIO):
        if numbers.get(name, own.min_gpu_memory_ratio * cards) < own.min_gpu_memory_ratio * cards:
            yield name, f"must be at least {own.min_gpu_memory_ratio} percent per card, not {numbers[name]} over {over}"


def _cards(numbers: Mapping[str, int]) -> int:
    if NVIDIA in numbers:
        return numbers[NVIDIA]
    if SHARED in numbers:
        return numbers[SHARED]
    return max(1, *(numbers.get(name, 0) // 100 for name in (GPU, CORE, RATIO)))


def _requests_of(container: Container, numbers: Mapping[str, int]) -> Iterator[ContainerRequest]:
    name, stage = container.name, container.stage
    if any(resource in numbers for resource in _OF_GPU):
        cards, both = _cards(numbers), numbers.get(GPU, 0)
        core, ratio = (numbers.get(resource, both) // cards for resource in (CORE, RATIO))
        memory = -(-numbers.get(MEMORY, 0) // cards)
        whole = NVIDIA in numbers or (core, ratio) == (100, WHOLE_RATIO)
        if whole:
            yield whole_cards(name, cards, stage, stock=NVIDIA in numbers)
        else:
            yield ContainerRequest(name, cards, core * 10, memory, stage=stage, ratio=ratio)
    for resource in sorted(numbers.keys() - {*_OF_GPU}):
        percent, type = numbers[resource], resource.removeprefix(PREFIX)
        devices = max(1, percent // 100)
        yield ContainerRequest(name, devices, percent * 10 // devices, stage=stage, type=type)


def _per_container(asks: Iterable[ContainerRequest], placement: Placement, cards: Sequence[Card]) -> str:
    minors: dict[str, dict[str, list[int]]] = {}
    for request in asks:
        known, chosen = by_index(cards, request.type), placement.cards(request.container, request.type)
        minors.setdefault(request.container, {})[request.type] = [_minor(known[i]) for i in chosen]
    return json.dumps(minors, separators=(",", ":"))


def _minor(card: Card) -> int:
    return card.index if card.minor is None else card.minor
