"""The dialect of Volcano mGPU: containers request core in percent and memory in MiB (docs/design/mgpu.md).

The amounts are totals over a container's cards. A "multiple" pod has the annotation `container-multiple-gpu` with the
number of cards of each app container. Any other pod is a "normal" pod. In a normal pod, a container gets a share of one
card, or whole cards if its core is a multiple of 100. The rules of normal pods also apply to the init containers of
multiple pods. Names and formats are Volcano's and must not change. The processes call the dialect through
`mgpu.dialects`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from mgpu.dialects.protocol import (
    NodeResource,
    no_cards_from_capacity,
    no_variables,
    nothing_to_acknowledge,
    unchanged,
)
from mgpu.model.cards import GPU, Card
from mgpu.model.errors import BadObject, Problem, Rule, raise_if_any
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Requirement, cards_by_index, whole_cards
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, RequestedAmount, Stage
from mgpu.model.quantities import MAX_QUANTITY
from mgpu.model.raw_objects import annotation_path
from mgpu.settings import MgpuSettings, Settings

NAME = "mgpu"
DEFAULT_CARD_POLICY = "binpack"

CORE = "vke.volcengine.com/mgpu-core"
MEMORY = "vke.volcengine.com/mgpu-memory"
MULTIPLE = "vke.volcengine.com/container-multiple-gpu"
COMPUTE_POLICY = "vke.volcengine.com/mgpu-compute-policy"
ASSUMED = "vke.volcengine.com/assumed"
INDEX_PREFIX = "vke.volcengine.com/gpu-index-container-"
NODE_LABEL = "vke.node.gpu.schedule"

FIXED_SHARE = "fixed-share"
NATIVE_BURST_SHARE = "native-burst-share"
COMPUTE_POLICIES = (FIXED_SHARE, "guaranteed-burst-share", NATIVE_BURST_SHARE)
MAX_CARDS = 16
NORMAL = -1
"""A value in place of a number of cards: the rules of normal pods apply to the container."""
MAX_NAME = 63 - len("gpu-index-container-")
"""The most characters of a container's name. `INDEX_PREFIX` and this name form the key of an annotation, in which at
most 63 characters may follow the slash."""
MIB = 1 << 20

_NOT_REQUESTED = "gives cards to a container that does not request any"
_MULTIPLE_PATH = annotation_path(MULTIPLE)
_CARD = re.compile(r"(?P<index>\d{1,9})|(?P<uuid>(?:GPU|MIG)-[\w.:/-]+)", re.ASCII)

RESOURCE_PREFIXES: tuple[str, ...] = (CORE, MEMORY)
RESOURCES_FOLLOW_CARDS = False
REQUEST_ANNOTATIONS: tuple[str, ...] = (MULTIPLE, COMPUTE_POLICY)
REQUEST_LABELS: tuple[str, ...] = ()
RECORD_KEYS: tuple[str, ...] = (ASSUMED, INDEX_PREFIX)
ACKNOWLEDGEMENTS: frozenset[str] = frozenset()
UNHEALTHY_CARD_LISTS = None

normalized = unchanged
acknowledgement = nothing_to_acknowledge
cards_from_capacity = no_cards_from_capacity
environment = no_variables


def enabled(settings: Settings) -> bool:
    own = settings.dialects.mgpu
    return own.enabled and own.mgpu_enable


def card_policy(settings: Settings) -> str | None:
    return settings.dialects.mgpu.policy


def owns_resource(name: str) -> bool:
    return name in (CORE, MEMORY)


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    entries, problems = _entries(pod)
    is_requested = any(c.requested(CORE) or c.requested(MEMORY) for c in pod.containers)
    if not is_requested and not problems and not any(entries.values()):
        return None
    own = settings.dialects.mgpu
    policy = pod.annotations.get(COMPUTE_POLICY, FIXED_SHARE)
    if policy not in COMPUTE_POLICIES:
        allowed = ", ".join(COMPUTE_POLICIES)
        text = f"must be one of {allowed}, not {policy!r}"
        problems.append(Problem(annotation_path(COMPUTE_POLICY), text, Rule.POLICY))
    requests: list[ContainerRequest] = []
    for container in pod.containers:
        multiple = MULTIPLE in pod.annotations and container.stage is Stage.APP
        try:
            requests += _container_request(container, entries.get(container.position) if multiple else NORMAL, own)
        except BadObject as error:
            problems += error.problems
    raise_if_any(problems)
    return GpuRequest(NAME, tuple(requests), own.max_containers_per_card, _requirements(pod, requests, policy))


def write_placement(
    pod: Pod,  # noqa: ARG001
    request: GpuRequest,
    placement: Placement,
    cards: Sequence[Card],
    settings: Settings,
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    by_id = settings.dialects.mgpu.schedule_mode == "id"
    known = cards_by_index(cards)
    written = {ASSUMED: "true"}
    for container in request.containers:
        chosen = placement.cards(container.container)
        # Write the index in place of a UUID that `read_placement` would reject. NVML never reports such a UUID, but a
        # list of simulated cards may contain one.
        names = [known[i].uuid if by_id and _CARD.fullmatch(known[i].uuid) else str(i) for i in chosen]
        written[INDEX_PREFIX + container.container] = ",".join(names)
    return written


def read_placement(pod: Pod, request: GpuRequest) -> tuple[Share, ...] | None:
    recorded = sorted(key for key in pod.annotations if key.startswith(INDEX_PREFIX))
    if ASSUMED not in pod.annotations and not recorded:
        return None
    shares: list[Share] = []
    problems: list[Problem] = []
    names = {c.name for c in pod.containers}
    positions = {c.name: str(c.position) for c in pod.app_containers}
    requesting = {c.container for c in request.containers}
    # Volcano's own plugin writes the position of a container instead of its name.
    requesting |= {positions.get(c.container, "") for c in request.containers} - names
    for one in request.containers:
        key = _record_key(pod.annotations, one.container, positions.get(one.container), names)
        cards = _read_cards(pod.annotations.get(key), one.cards)
        if isinstance(cards, str):
            problems.append(Problem(annotation_path(key), cards))
        else:
            shares += (Share(one.container, card, one.core, one.memory, one.whole, one.stage) for card in cards)
    strange = (key for key in recorded if key.removeprefix(INDEX_PREFIX) not in requesting)
    problems += (Problem(annotation_path(key), _NOT_REQUESTED) for key in strange)
    raise_if_any(problems)
    return tuple(shares)


def owns_annotation(key: str) -> bool:
    return key == ASSUMED or key.startswith(INDEX_PREFIX)


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    if not enabled(settings):
        return ()
    gpus = [card for card in cards if card.type == GPU]
    return (
        NodeResource(CORE, tuple((card.index, 100) for card in gpus), as_ids=True),
        NodeResource(MEMORY, tuple((card.index, card.memory // MIB) for card in gpus), as_ids=False, of_memory=True),
    )


def _entries(pod: Pod) -> tuple[dict[int, int], list[Problem]]:
    """Return the valid entries of `container-multiple-gpu`, by the position of the app container, and all problems."""
    text = pod.annotations.get(MULTIPLE)
    if text is None:
        return {}, []
    containers = pod.app_containers
    # Split off only one entry more than there are containers, since a text of 256 KiB may have 130,000 entries.
    parts = [part.strip() for part in text.split(",", len(containers) + 1)]
    more = text.count(",") + 1 - len(parts)
    entries = {i: int(part) for i, part in enumerate(parts) if re.fullmatch(r"\d{1,9}", part, re.ASCII)}
    problems = [
        Problem(_MULTIPLE_PATH, f"entry {i} must be an integer of at least 0, not {part[:40]!r}", Rule.CONTAINER_LIST)
        for i, part in enumerate(parts[: len(containers) + 1])
        if i not in entries
    ]
    found = len(parts) + more
    if found != len(containers):
        count = f"{found} entr{'y' if found == 1 else 'ies'}, {len(containers)} container"
        count += "" if len(containers) == 1 else "s"
        text = f"must have one entry per container of spec.containers: {count}"
        problems.append(Problem(_MULTIPLE_PATH, text, Rule.CONTAINER_LIST))
    return entries, problems


def _container_request(container: Container, cards: int | None, own: MgpuSettings) -> Iterable[ContainerRequest]:
    """Return the request of one container, if any. Raises BadObject.

    Args:
        cards: the container's entry in a multiple pod, or `NORMAL`. None means that the entry is missing or invalid.
            The function then checks the rules that do not depend on the entry, and returns no request.
    """
    core = container.requested(CORE)
    memory = container.requested(MEMORY)
    if core is None and memory is None:
        if cards is not None and cards > 0:
            text = f"gives {cards} to container {container.name!r}, which requests no GPU"
            raise BadObject([Problem(_MULTIPLE_PATH, text, Rule.CONTAINER_LIST)])
        return ()
    core_path, memory_path = _paths(core, memory)
    problems: list[Problem] = []
    percent = (core.positive(problems, most=MAX_QUANTITY // MIB) if core else None) or 0
    mib = (memory.positive(problems, most=MAX_QUANTITY // MIB) if memory else None) or 0
    if core is None:
        problems.append(Problem(core_path, f"must be set where {MEMORY} is", Rule.CORE_WITH_MEMORY))
    if cards == 0:
        text = f"gives 0 to container {container.name!r}, which requests GPU"
        problems.append(Problem(_MULTIPLE_PATH, text, Rule.CONTAINER_LIST))
    if len(container.name) > MAX_NAME:
        text = f"must be at most {MAX_NAME} characters long where the container requests GPU: it names an annotation"
        problems.append(Problem(f"{container.path}.name", text, Rule.CONTAINER_NAME))
    if not problems and cards is not None:
        has_memory = memory is not None
        if cards == NORMAL:
            broken = _normal(percent, mib, own, has_memory=has_memory)
        else:
            broken = _multiple(percent, mib, cards, own, has_memory=has_memory)
        problems += (Problem(core_path if name == CORE else memory_path, text, rule) for name, text, rule in broken)
    raise_if_any(problems)
    if cards is None:
        return ()
    if percent % 100 == 0 and cards in (NORMAL, percent // 100):
        return (whole_cards(container.name, percent // 100, container.stage),)
    count = 1 if cards == NORMAL else cards
    return (ContainerRequest(container.name, count, percent * 10 // count, mib * MIB // count, stage=container.stage),)


def _paths(core: RequestedAmount | None, memory: RequestedAmount | None) -> tuple[str, str]:
    """Return the paths of core and memory. The path of an unset field is derived from that of the other."""
    core_path = core.path if core else ""
    memory_path = memory.path if memory else ""
    return core_path or memory_path.replace(MEMORY, CORE), memory_path or core_path.replace(CORE, MEMORY)


def _normal(core: int, mib: int, own: MgpuSettings, *, has_memory: bool) -> Iterator[tuple[str, str, Rule]]:
    """Yield (resource, message, rule) for each rule that a container of a normal pod breaks."""
    if core % 100 == 0:
        if has_memory:
            text = f"must not be set for whole cards ({CORE} is {core}, a multiple of 100)"
            yield MEMORY, text, Rule.MEMORY_OF_WHOLE_CARDS
        if core > 100 * MAX_CARDS:
            yield CORE, f"requests {core // 100} cards; a container may hold at most {MAX_CARDS}", Rule.TOO_MUCH
    elif core > 100:
        yield CORE, f"above 100 must be a multiple of 100 (whole cards), not {core}", Rule.WHOLE_CARDS
    if core < 100 and mib < own.min_gpu_memory:
        text = f"must be at least {own.min_gpu_memory} (MiB) for a share of a card, not {mib}"
        yield MEMORY, text, Rule.MEMORY_MINIMUM


def _multiple(
    core: int, mib: int, cards: int, own: MgpuSettings, *, has_memory: bool
) -> Iterator[tuple[str, str, Rule]]:
    """Yield (resource, message, rule) for each rule that a container with `cards` cards of a multiple pod breaks."""
    if cards > MAX_CARDS:
        yield CORE, f"requests {cards} cards; a container may hold at most {MAX_CARDS}", Rule.TOO_MUCH
    if core > 100 * cards:
        yield CORE, f"must be at most 100 per card: {core} over {cards} cards", Rule.AT_MOST_A_CARD
    if core % cards:
        yield CORE, f"must be divisible by the number of cards: {core} over {cards} cards", Rule.EVEN_OVER_CARDS
    if mib % cards:
        yield MEMORY, f"must be divisible by the number of cards: {mib} over {cards} cards", Rule.EVEN_OVER_CARDS
    if core == 100 * cards:
        if has_memory:
            text = f"must not be set for whole cards ({core} over {cards} cards is 100 per card)"
            yield MEMORY, text, Rule.MEMORY_OF_WHOLE_CARDS
    elif mib < own.min_gpu_memory * cards:
        text = f"must be at least {own.min_gpu_memory} (MiB) per card: {mib} over {cards} cards"
        yield MEMORY, text, Rule.MEMORY_MINIMUM


def _requirements(pod: Pod, requests: Sequence[ContainerRequest], policy: str) -> tuple[Requirement, ...]:
    """Return the requirements on the node: rules 1 and 2 of docs/design/mgpu.md, "Filter"."""
    serves = Requirement(NODE_LABEL, (NAME,), f"node label {NODE_LABEL} is {{found}}, not {NAME}")
    found = "node's compute policy is {found}"
    if MULTIPLE in pod.annotations:
        if policy != NATIVE_BURST_SHARE:
            reason = f"container-multiple-gpu needs the compute policy {NATIVE_BURST_SHARE}, the pod has {policy}"
            return serves, Requirement(COMPUTE_POLICY, (), reason, default=FIXED_SHARE)
        reason = f"{found}, container-multiple-gpu needs {NATIVE_BURST_SHARE}"
        return serves, Requirement(COMPUTE_POLICY, (NATIVE_BURST_SHARE,), reason, default=FIXED_SHARE)
    if all(request.whole for request in requests):
        return (serves,)
    return serves, Requirement(COMPUTE_POLICY, (policy,), f"{found}, the pod's is {policy}", default=FIXED_SHARE)


def _record_key(annotations: Collection[str], container: str, position: str | None, names: Collection[str]) -> str:
    """Return the key of the annotation with a container's cards, which ends with the container's name or position.

    Volcano's own plugin writes positions. A position that is also the name of a container is read as that name.
    """
    key = INDEX_PREFIX + container
    if key in annotations or position is None or position in names:
        return key
    return INDEX_PREFIX + position if INDEX_PREFIX + position in annotations else key


def _read_cards(text: str | None, count: int) -> list[int | str] | str:
    """Return the cards in the value of a record, or the problem with the value."""
    if text is None:
        return "is missing"
    found: list[int | str] = []
    for part in text.split(","):
        match = _CARD.fullmatch(part.strip())
        if match is None:
            return f"{part!r} is neither a card index nor a UUID"
        found.append(int(match["index"]) if match["index"] else match["uuid"])
    if len(set(found)) != len(found):
        return f"names a card twice: {text}"
    if len(found) != count:
        return f"names {len(found)} cards, but the container requests {count}"
    return found
