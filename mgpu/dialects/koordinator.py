"""The dialect of Koordinator's fine-grained device scheduling (docs/design/koordinator.md).

`koordinator_record` reads and writes the allocation record. Pods request GPUs in percent of cards (`gpu`, `gpu-core`,
`gpu-memory-ratio`) and in bytes (`gpu-memory`). These amounts are totals over a container's cards. The amount of
`nvidia.com/gpu` is a number of whole cards, and that of `gpu.shared` is the number of cards over which the other
amounts are divided. The amount of any other `koordinator.sh/<type>` is in percent of devices of that type. A type can
have any name, except names that begin with `gpu` and names of MIG instances. Names and rules are Koordinator's and must
not change. The processes call the dialect through `mgpu.dialects`.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from mgpu.dialects.koordinator_record import (
    ALLOCATED,
    PER_CONTAINER,
    DeviceAllocation,
    pod_shares,
    read_allocations,
    recorded_shares,
    write_allocations,
)
from mgpu.dialects.protocol import Amounts, NodeResource, no_cards_from_capacity, no_variables, nothing_to_acknowledge
from mgpu.model.cards import GPU as GPU_TYPE
from mgpu.model.cards import WHOLE_CORE, WHOLE_RATIO, Card
from mgpu.model.errors import MAX_PROBLEMS, BadObject, Problem, Rule, raise_if_any
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, cards_by_index, peak, whole_cards
from mgpu.model.isolation import HAMI_CORE, NEEDS_HAMI_CORE
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, RequestedAmount, is_none
from mgpu.model.quantities import MAX_QUANTITY, quantity_of_bytes, same_quantity, whole_bytes
from mgpu.model.raw_objects import annotation_path
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
"""The maximum length of a misspelt name for which a similar name is sought. A longer name is never similar enough."""
MIB = 1 << 20
MAX_DEVICES = 1024
"""The most devices of one type that a container may request. No node has more."""
MAX_MEMORY = MAX_QUANTITY // 1000
"""The most bytes of GPU memory that a container may request. No node has more."""
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
ISOLATION_PROVIDER = "koordinator.sh/gpu-isolation-provider"
"""The label of a pod that names what holds it to its share. Koordinator knows one value, `HAMi-core`, and compares it
with the same label of the node (koordinator-sh/koordinator, apis/extension/device_share.go, and the plugin deviceshare,
July 2026). mgpu asks whether the node's agent can apply HAMi-core."""
_HAMI_CORE = "HAMi-core"
_TYPE = re.compile(r"(?!gpu|mig-\d+g\.)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)

RESOURCE_PREFIXES: tuple[str, ...] = (PREFIX, NVIDIA)
RESOURCES_FOLLOW_CARDS = False
REQUEST_ANNOTATIONS: tuple[str, ...] = ()
REQUEST_LABELS: tuple[str, ...] = (ISOLATION_PROVIDER,)
RECORD_KEYS: tuple[str, ...] = (ALLOCATED, PER_CONTAINER)
ACKNOWLEDGEMENTS: frozenset[str] = frozenset()
UNHEALTHY_CARD_LISTS = None

acknowledgement = nothing_to_acknowledge
cards_from_capacity = no_cards_from_capacity
environment = no_variables  # Koordinator sets only NVIDIA_VISIBLE_DEVICES, which mgpu sets for every dialect.


def enabled(settings: Settings) -> bool:
    return settings.dialects.koordinator.enabled


def card_policy(settings: Settings) -> str | None:
    return settings.dialects.koordinator.policy


def owns_resource(name: str) -> bool:
    return name == NVIDIA or name.startswith(PREFIX)


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    found: list[ContainerRequest] = []
    problems: list[Problem] = []
    for container in pod.containers:
        try:
            hints = max(0, MAX_PROBLEMS - len(problems))
            found += _container_requests(container, settings.dialects.koordinator, hints)
        except BadObject as error:
            problems += error.problems
    of_gpu = tuple(request for request in found if request.type == GPU_TYPE)
    others = sorted((request for request in found if request.type != GPU_TYPE), key=lambda request: request.type)
    provider = pod.labels.get(ISOLATION_PROVIDER, "") if of_gpu else ""
    if provider not in ("", _HAMI_CORE):
        path = f"metadata.labels[{ISOLATION_PROVIDER}]"
        problems.append(Problem(path, f"must be {_HAMI_CORE}, not {provider}", Rule.ISOLATION_PROVIDER))
    raise_if_any(problems)
    if not found:
        return None
    if provider:
        return GpuRequest(NAME, of_gpu, 0, (NEEDS_HAMI_CORE,), others=tuple(others), isolation=HAMI_CORE)
    return GpuRequest(NAME, of_gpu, others=tuple(others))


def write_placement(
    pod: Pod,  # noqa: ARG001
    request: GpuRequest,
    placement: Placement,
    cards: Sequence[Card],
    settings: Settings,  # noqa: ARG001
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    requests = (*request.containers, *request.others)
    devices: list[DeviceAllocation] = []
    for type in dict.fromkeys(one.type for one in requests):
        known = cards_by_index(cards, type)
        chosen = [(one, i) for one in requests if one.type == type for i in placement.cards(one.container, type)]
        for index in sorted({i for _, i in chosen}):
            card = known[index]
            of_pod = peak((one.stage, one.amount_on(card)) for one, i in chosen if i == index)
            percent = of_pod.core * WHOLE_RATIO // WHOLE_CORE
            devices.append(DeviceAllocation(type, _minor(card), card.uuid, percent, of_pod.memory, of_pod.ratio))
    written = {ALLOCATED: write_allocations(devices)}
    if len({one.container for one in requests}) > 1:
        written[PER_CONTAINER] = _per_container(requests, placement, cards)
    return written


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    """Return the shares in mgpu's record of each container, or else those in the record of the whole pod."""
    text = pod.annotations.get(ALLOCATED)
    per_container = pod.annotations.get(PER_CONTAINER)
    if text is None:
        if per_container is not None:
            raise BadObject(
                [Problem(annotation_path(PER_CONTAINER), f"is a supplement to {ALLOCATED}, which is missing")]
            )
        return None
    devices = read_allocations(text)
    requests = (*request.containers, *request.others)
    if per_container is not None:
        return tuple(recorded_shares(requests, devices, per_container))
    return tuple(pod_shares(requests, devices))


def owns_annotation(key: str) -> bool:
    return key in (ALLOCATED, PER_CONTAINER)


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    if not enabled(settings):
        return ()
    gpus = [card for card in cards if card.type == GPU_TYPE]
    percent = tuple((card.index, 100) for card in gpus)
    others = {card.type: cards_by_index(cards, card.type) for card in cards if card.type != GPU_TYPE}
    return (
        NodeResource(NVIDIA, tuple((card.index, 1) for card in gpus), as_ids=True),
        NodeResource(CORE, percent, as_ids=True),
        NodeResource(RATIO, percent, as_ids=True, of_memory=True),
        NodeResource(MEMORY, tuple((card.index, card.memory) for card in gpus), as_ids=False, of_memory=True),
        NodeResource(SHARED, percent, as_ids=False),
        *(NodeResource(PREFIX + t, tuple((i, 100) for i in others[t]), as_ids=False, type=t) for t in sorted(others)),
    )


def normalized(requests: Amounts, limits: Amounts) -> tuple[Amounts, Amounts]:
    """Replace `koordinator.sh/gpu` by `gpu-core` and `gpu-memory-ratio`, as Koordinator's webhook does.

    Invalid amounts stay unchanged, so that the validation rejects them.
    """
    if not same_quantity(requests.get(GPU, ""), limits.get(GPU, "")):
        return requests, limits
    return _normalized(requests), _normalized(limits)


def _normalized(amounts: Amounts) -> Amounts:
    of_gpu = [name for name in _OF_GPU if name in amounts and not is_none(name, amounts[name])]
    if of_gpu != [GPU]:
        return amounts
    numbers, problems = _numbers({GPU: RequestedAmount(amounts[GPU], "")})
    if problems or any(_broken(of_gpu, numbers)):
        return amounts
    others = {name: amount for name, amount in amounts.items() if name != GPU}
    return others | {CORE: amounts[GPU], RATIO: amounts[GPU]}


def _container_requests(container: Container, own: KoordinatorSettings, hints: int) -> Iterable[ContainerRequest]:
    """Return the requests of one container, one for each type of devices. Raises BadObject with every broken rule.

    Args:
        hints: the maximum number of misspelt names for which a similar name is suggested. The number is limited
            because each suggestion takes 50 µs.
    """
    names = sorted({name for name in (*container.requests, *container.limits) if owns_resource(name)})
    amounts = {name: amount for name in names if (amount := container.requested(name))}
    if not amounts:
        return ()
    misspelt = dict.fromkeys(name for name in amounts if _is_strange(name))
    numbers, problems = _numbers({name: amount for name, amount in amounts.items() if name not in misspelt})
    for i, name in enumerate(misspelt):
        text = "is not a resource of GPUs" + (_similar(name) if i < hints else "")
        problems.append(Problem(amounts[name].path, text, Rule.RESOURCE_NAME))
    problems += (Problem(amounts[name].path, text, rule) for name, text, rule in _broken(amounts, numbers))
    if not problems:
        minimum = Rule.MEMORY_MINIMUM
        problems += (Problem(amounts[name].path, text, minimum) for name, text in _too_little(numbers, own))
    if problems:
        raise BadObject(sorted(problems))
    return _requests_of(container, numbers)


def _is_strange(name: str) -> bool:
    """Return whether the name is neither that of a GPU resource nor valid for another device type."""
    return name not in _OF_GPU and not _TYPE.fullmatch(name.removeprefix(PREFIX))


def _similar(name: str) -> str:
    close = get_close_matches(name, _OF_GPU, n=1, cutoff=0.8) if len(name) <= _LONGEST else []
    return f"; did you mean {close[0]}?" if close else ""


def _numbers(amounts: Mapping[str, RequestedAmount]) -> tuple[dict[str, int], list[Problem]]:
    """Return the valid amounts, and a problem for each other amount."""
    numbers: dict[str, int] = {}
    problems: list[Problem] = []
    for name, amount in amounts.items():
        if name == MEMORY:
            number = amount.positive(problems, most=MAX_MEMORY, read=whole_bytes)
        else:
            number = amount.positive(problems, most=MAX_DEVICES * (1 if name in (NVIDIA, SHARED) else 100))
        if number is not None:
            numbers[name] = number
    return numbers, problems


def _broken(names: Collection[str], numbers: Mapping[str, int]) -> Iterator[tuple[str, str, Rule]]:
    """Yield (resource, message, rule) for each rule that a container breaks with the resources `names`.

    docs/design/koordinator.md, "Resources", describes the rules.

    Args:
        names: the resources that the container requests.
        numbers: the valid amounts, by resource.
    """
    of_gpu = [name for name in _OF_GPU if name in names]
    known = not of_gpu or frozenset(of_gpu) in _VALID
    if not known:
        one = "cannot be requested alone" if len(of_gpu) == 1 else f"cannot be combined with {' and '.join(of_gpu[1:])}"
        yield of_gpu[0], f"{one}; a container can request one of {_ALLOWED}", Rule.RESOURCE_COMBINATION
    free = (NVIDIA, MEMORY, SHARED, *((CORE, RATIO) if SHARED in names else ()))
    odd = [name for name, number in numbers.items() if name not in free and number > 100 and number % 100]
    for name in odd:
        yield name, f"above 100 must be a multiple of 100 (whole devices), not {numbers[name]}", Rule.WHOLE_CARDS
    if not known or not numbers.keys() >= {*of_gpu} or not {*odd}.isdisjoint(of_gpu):
        return
    cards = _card_count(numbers)
    for name in (CORE, RATIO):
        if numbers.get(name, 0) % cards:
            text = f"must be divisible by the number of cards: {numbers[name]} over {cards} cards"
            yield name, text, Rule.EVEN_OVER_CARDS
        elif numbers.get(name, 0) > 100 * cards:
            text = f"must be at most 100 per card: {numbers[name]} over {cards} card{'' if cards == 1 else 's'}"
            yield name, text, Rule.AT_MOST_A_CARD


def _too_little(numbers: Mapping[str, int], own: KoordinatorSettings) -> Iterator[tuple[str, str]]:
    """Yield (resource, message) for each amount below the minimum in the settings.

    The minimum exists because even a tiny share makes a card unavailable to pods that request whole cards. With the
    minimum, a ResourceQuota also limits the number of cards that a namespace can use (docs/quotas.md).
    """
    if not {GPU, MEMORY, RATIO} & numbers.keys():
        return
    cards = _card_count(numbers)
    over = f"{cards} card{'' if cards == 1 else 's'}"
    least = own.min_gpu_memory * MIB
    if MEMORY in numbers and numbers[MEMORY] < least * cards:
        rule = f"must be at least {quantity_of_bytes(least)} per card, not {numbers[MEMORY]} bytes over {over}"
        yield MEMORY, f"{rule}; a number without a suffix is in bytes, and 8 GiB are written as 8Gi"
    for name in (GPU, RATIO):
        if numbers.get(name, own.min_gpu_memory_ratio * cards) < own.min_gpu_memory_ratio * cards:
            yield name, f"must be at least {own.min_gpu_memory_ratio} percent per card, not {numbers[name]} over {over}"


def _card_count(numbers: Mapping[str, int]) -> int:
    if NVIDIA in numbers:
        return numbers[NVIDIA]
    if SHARED in numbers:
        return numbers[SHARED]
    return max(1, *(numbers.get(name, 0) // 100 for name in (GPU, CORE, RATIO)))


def _requests_of(container: Container, numbers: Mapping[str, int]) -> Iterator[ContainerRequest]:
    name, stage = container.name, container.stage
    if any(resource in numbers for resource in _OF_GPU):
        cards = _card_count(numbers)
        both = numbers.get(GPU, 0)
        core, ratio = (numbers.get(resource, both) // cards for resource in (CORE, RATIO))
        memory = -(-numbers.get(MEMORY, 0) // cards)
        whole = NVIDIA in numbers or (core, ratio) == (100, WHOLE_RATIO)
        if whole:
            yield whole_cards(name, cards, stage, is_nvidia_gpu=NVIDIA in numbers)
        else:
            yield ContainerRequest(name, cards, core * 10, memory, stage=stage, ratio=ratio)
    for resource in sorted(numbers.keys() - {*_OF_GPU}):
        percent, type = numbers[resource], resource.removeprefix(PREFIX)
        devices = max(1, percent // 100)
        yield ContainerRequest(name, devices, percent * 10 // devices, stage=stage, type=type)


def _per_container(requests: Iterable[ContainerRequest], placement: Placement, cards: Sequence[Card]) -> str:
    minors: dict[str, dict[str, list[int]]] = {}
    for request in requests:
        known = cards_by_index(cards, request.type)
        chosen = placement.cards(request.container, request.type)
        minors.setdefault(request.container, {})[request.type] = [_minor(known[i]) for i in chosen]
    return json.dumps(minors, separators=(",", ":"))


def _minor(card: Card) -> int:
    return card.index if card.minor is None else card.minor
