"""Volcano mGPU (seeds/volcano-mgpu.md; spec page mgpu.md).

Core is percent of cards and memory is MiB, both in total over a container's cards. `container-multiple-gpu` makes a
"multiple" pod: its list gives the cards of each app container; without it, core in whole hundreds is whole cards.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import GPU, Card
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Requirement, by_index, whole_cards
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, Stage
from mgpu.model.quantities import MAX, QuantityError, whole_number
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
"""In place of a container's entry in `container-multiple-gpu`, where the rules of normal pods hold for it."""
MAX_NAME = 63 - len("gpu-index-container-")
"""Of a container: the name of an annotation that records its cards has at most 63 characters."""
MIB = 1 << 20

_UNASKED = "gives cards to a container that does not ask for any"
_MULTIPLE_PATH = f"metadata.annotations[{MULTIPLE}]"
_CARD = re.compile(r"(?P<index>\d{1,9})|(?P<uuid>(?:GPU|MIG)-[\w.:/-]+)", re.ASCII)

ASK_ANNOTATIONS: tuple[str, ...] = (MULTIPLE, COMPUTE_POLICY)
RECORD_KEYS: tuple[str, ...] = (ASSUMED, INDEX_PREFIX)


def enabled(settings: Settings) -> bool:
    own = settings.dialects.mgpu
    return own.enabled and own.mgpu_enable


def card_policy(settings: Settings) -> str | None:
    return settings.dialects.mgpu.policy


def read_request(pod: Pod, settings: Settings) -> GpuRequest | None:
    asking = [c for c in pod.containers if c.asked(CORE) or c.asked(MEMORY)]
    entries, problems = _entries(pod)
    if not asking and not problems and not any(entries.values()):
        return None
    own = settings.dialects.mgpu
    policy = pod.annotations.get(COMPUTE_POLICY, FIXED_SHARE)
    if policy not in COMPUTE_POLICIES:
        allowed = ", ".join(COMPUTE_POLICIES)
        problems.append(Problem(f"metadata.annotations[{COMPUTE_POLICY}]", f"must be one of {allowed}, not {policy!r}"))
    requests: list[ContainerRequest] = []
    for container in pod.containers:
        multiple = MULTIPLE in pod.annotations and container.stage is Stage.APP
        try:
            requests += _container_request(container, entries.get(container.position) if multiple else NORMAL, own)
        except BadObject as error:
            problems += error.problems
    if problems:
        raise BadObject(problems)
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
    known = by_index(cards)
    written = {ASSUMED: "true"}
    for container in request.containers:
        chosen = placement.cards(container.container)
        # A UUID that could not be read back (a hand-written card list may have any) is written as its index.
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
    asking = {c.container for c in request.containers} | {
        positions.get(c.container, "") for c in request.containers
    } - names
    for wanted in request.containers:
        key = _record_key(pod.annotations, wanted.container, positions.get(wanted.container), names)
        cards, problem = _cards(pod.annotations.get(key), wanted.cards)
        if problem:
            problems.append(Problem(f"metadata.annotations[{key}]", problem))
        shares += (
            Share(wanted.container, card, wanted.core, wanted.memory, wanted.whole, wanted.stage) for card in cards
        )
    strange = (key for key in recorded if key.removeprefix(INDEX_PREFIX) not in asking)
    problems += (Problem(f"metadata.annotations[{key}]", _UNASKED) for key in strange)
    if problems:
        raise BadObject(problems)
    return tuple(shares)


def owns_annotation(key: str) -> bool:
    return key == ASSUMED or key.startswith(INDEX_PREFIX)


def resources(cards: Sequence[Card], settings: Settings) -> tuple[NodeResource, ...]:
    if not enabled(settings):
        return ()
    gpus = [card for card in cards if card.type == GPU]
    return (
        NodeResource(CORE, tuple((card.index, 100) for card in gpus), as_ids=True),
        NodeResource(MEMORY, tuple((card.index, card.memory // MIB) for card in gpus), as_ids=False),
    )


def environment(pod: Pod, request: ContainerRequest, cards: Sequence[Card], gpus: Sequence[Card]) -> dict[str, str]:  # noqa: ARG001
    return {}


def _entries(pod: Pod) -> tuple[dict[int, int], list[Problem]]:
    """The usable entries of `container-multiple-gpu` by position of the app container, and what is wrong with it."""
    text = pod.annotations.get(MULTIPLE)
    if text is None:
        return {}, []
    containers = pod.app_containers
    # One entry more than there are containers tells that the list does not fit; a text of 256 KiB has 130,000 entries.
    parts = [part.strip() for part in text.split(",", len(containers) + 1)]
    more = text.count(",") + 1 - len(parts)
    entries = {i: int(part) for i, part in enumerate(parts) if re.fullmatch(r"\d{1,9}", part, re.ASCII)}
    problems = [
        Problem(_MULTIPLE_PATH, f"entry {i} must be an integer of at least 0, not {part[:40]!r}")
        for i, part in enumerate(parts[: len(containers) + 1])  # that there are more is told by their number
        if i not in entries
    ]
    found = len(parts) + more
    if found != len(containers):
        count = f"{found} entr{'y' if found == 1 else 'ies'}, {len(containers)} container"
        count += "" if len(containers) == 1 else "s"
        problems.append(Problem(_MULTIPLE_PATH, f"must have one entry per container of spec.containers: {count}"))
    return entries, problems


def _container_request(container: Container, cards: int | None, own: MgpuSettings) -> Iterable[ContainerRequest]:
    """The ask of one container, if it asks. Raises BadObject.

    cards: its entry in a multiple pod, or NORMAL; None: its entry is unusable, then only the amounts are checked.
    """
    core, memory = container.asked(CORE), container.asked(MEMORY)
    if core is None and memory is None:
        if cards is not None and cards > 0:
            text = f"gives {cards} to container {container.name!r}, which asks for no GPU"
            raise BadObject([Problem(_MULTIPLE_PATH, text)])
        return ()
    core_path, memory_path = _paths(container)
    problems: list[Problem] = []
    percent = _amount(core, problems)
    mib = _amount(memory, problems)
    if core is None:
        problems.append(Problem(core_path, f"must be set where {MEMORY} is"))
    if cards == 0:
        problems.append(Problem(_MULTIPLE_PATH, f"gives 0 to container {container.name!r}, which asks for GPU"))
    if len(container.name) > MAX_NAME:
        text = f"must be at most {MAX_NAME} characters long where the container asks for GPU: it names an annotation"
        problems.append(Problem(f"{container.path}.name", text))
    if not problems and cards is not None:
        check = _normal(percent, memory, mib, own) if cards == NORMAL else _multiple(percent, memory, mib, cards, own)
        problems += (Problem(core_path if what == CORE else memory_path, text) for what, text in check)
    if problems:
        raise BadObject(problems)
    if cards is None:
        return ()
    if percent % 100 == 0 and cards in (NORMAL, percent // 100):
        return (whole_cards(container.name, percent // 100, container.stage),)
    count = 1 if cards == NORMAL else cards
    return (ContainerRequest(container.name, count, percent * 10 // count, mib * MIB // count, stage=container.stage),)


def _paths(container: Container) -> tuple[str, str]:
    """Where core and memory stand, or would stand beside the other one."""
    core, memory = container.asked(CORE), container.asked(MEMORY)
    core_path = core[1] if core else memory[1].replace(MEMORY, CORE) if memory else ""
    return core_path, memory[1] if memory else core_path.replace(CORE, MEMORY)


def _amount(asked: tuple[str, str] | None, problems: list[Problem]) -> int:
    if asked is None:
        return 0
    text, path = asked
    try:
        number = whole_number(text)
    except QuantityError as error:
        problems.append(Problem(path, str(error)))
        return 0
    if number <= 0:
        problems.append(Problem(path, f"must be greater than 0, not {text}"))
    elif number > MAX // MIB:
        problems.append(Problem(path, f"{text} is more than any node has"))
    return number


def _normal(core: int, memory: tuple[str, str] | None, mib: int, own: MgpuSettings) -> Iterable[tuple[str, str]]:
    """The seed's rules for a container of a normal pod, as (resource, message)."""
    if core % 100 == 0:
        if memory:
            yield MEMORY, f"must not be set for whole cards ({CORE} is {core}, a multiple of 100)"
        if core > 100 * MAX_CARDS:
            yield CORE, f"asks for {core // 100} cards; a container may hold at most {MAX_CARDS}"
    elif core > 100:
        yield CORE, f"above 100 must be a multiple of 100 (whole cards), not {core}"
    if core < 100 and mib < own.min_gpu_memory:
        yield MEMORY, f"must be at least {own.min_gpu_memory} (MiB) for a share of a card, not {mib}"


def _multiple(
    core: int, memory: tuple[str, str] | None, mib: int, cards: int, own: MgpuSettings
) -> Iterable[tuple[str, str]]:
    """The seed's rules for a container of a multiple pod that gets `cards` cards, as (resource, message)."""
    if cards > MAX_CARDS:
        yield CORE, f"asks for {cards} cards; a container may hold at most {MAX_CARDS}"
    if core > 100 * cards:
        yield CORE, f"must be at most 100 per card: {core} over {cards} cards"
    if core % cards:
        yield CORE, f"must be divisible by the number of cards: {core} over {cards} cards"
    if mib % cards:
        yield MEMORY, f"must be divisible by the number of cards: {mib} over {cards} cards"
    if core == 100 * cards:
        if memory:
            yield MEMORY, f"must not be set for whole cards ({core} over {cards} cards is 100 per card)"
    elif mib < own.min_gpu_memory * cards:
        yield MEMORY, f"must be at least {own.min_gpu_memory} (MiB) per card: {mib} over {cards} cards"


def _requirements(pod: Pod, requests: Sequence[ContainerRequest], policy: str) -> tuple[Requirement, ...]:
    """docs/design/mgpu.md, "Filter", rules 1 and 2. Rule 3 and the fit itself are the placement's."""
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
    """Where a container's cards stand: by its name, else by its position unless that is another one's name."""
    key = INDEX_PREFIX + container
    if key in annotations or position is None or position in names:
        return key
    return INDEX_PREFIX + position if INDEX_PREFIX + position in annotations else key


def _cards(text: str | None, wanted: int) -> tuple[list[int | str], str]:
    """The cards of a record's value, and what is wrong with it ("" where nothing is)."""
    if text is None:
        return [], "is missing"
    found: list[int | str] = []
    for part in text.split(","):
        match = _CARD.fullmatch(part.strip())
        if match is None:
            return [], f"{part!r} is neither a card index nor a UUID"
        found.append(int(match["index"]) if match["index"] else match["uuid"])
    if len(set(found)) != len(found):
        return [], f"names a card twice: {text}"
    if len(found) != wanted:
        return [], f"names {len(found)} cards, the container asks for {wanted}"
    return found, ""
