"""Defines live resizes: how the memory share of a running container changes in the annotations of its pod.

Kubernetes' own in-place resize (`pods/resize`) changes only cpu and memory, so annotations of the pod carry the resize.
Three parties take part, and each of them writes one annotation:

    user       RESIZE   the wanted amounts
    scheduler  RESIZED  part of the sealed record: for each resized container the limit that must be in force, the
                        amount that the ledger holds, and a serial number, which grows with every change of a limit
    agent      APPLIED  the serial number of the limits that are in force, and the containers that can be resized

A container must never have a limit above what the ledger holds for it, or another pod could get memory that the
container still uses. This holds for these reasons, in whatever order the three write, and however late they see it:

1. `limit` is never above `held`, and one write sets both. The agent puts only limits of the record into force, and
   sees the versions of a pod in order.
2. The scheduler lowers `held` only to `limit`, and only in a version in which `APPLIED` names the current serial
   number. By then, the agent has put this limit into force, and all later versions have the same one.
3. The scheduler's write names the version on which it is based, so no other write can come between.

So a larger share is held first and allowed then, and a smaller one is enforced first and freed then. The functions are
pure. docs/resize.md describes the resize for users.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mgpu.model.cards import GPU
from mgpu.model.errors import BadObject, Problem, Rule, raise_if_any
from mgpu.model.ledger import Share
from mgpu.model.pods import Stage
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, whole_bytes
from mgpu.model.raw_objects import annotation_path, is_integer, parse_json_object, table_at

RESIZE = "mgpu.io/resize"
"""The annotation in which users state the memory that containers should have of each of their cards: `train=6Gi`, or
several such entries with commas between them."""
RESIZED = "mgpu.io/resized"
APPLIED = "mgpu.io/resize-applied"

MAX_TEXT = 2048
"""The most characters of `RESIZE`. Longer texts are not stored whole (`mgpu.dialects.watched_pods`)."""
_MIB = 1 << 20
_MOST = MAX_QUANTITY // 1000
"""The most bytes of a share. No card has nearly as many, and sums over containers stay below 2^63."""


@dataclass(frozen=True, slots=True)
class Size:
    """The memory of a container on each of its cards, in bytes.

    Attributes:
        limit: The limit that the agent must put into force.
        held: What the ledger holds. While a limit is being lowered, it is more than `limit`.
    """

    limit: int
    held: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The content of the annotation `RESIZED`.

    Attributes:
        serial: The number of changes of limits so far.
        containers: The sizes of the containers that were resized. Other containers have what they request.
    """

    serial: int = 0
    containers: Mapping[str, Size] = field(default_factory=dict, hash=False)


NO_SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Applied:
    """The content of the annotation `APPLIED`.

    Attributes:
        serial: The serial number of the limits that are in force.
        containers: The containers whose limits the agent can change.
    """

    serial: int = -1
    containers: frozenset[str] = frozenset()


NOT_APPLIED = Applied()


def read_wanted(text: str) -> dict[str, int]:
    """Return the wanted bytes by container. Raises BadObject with every problem of the text."""
    path = annotation_path(RESIZE)
    if len(text) > MAX_TEXT:
        raise BadObject([Problem(path, f"must have at most {MAX_TEXT} characters", Rule.TOO_LARGE)])
    problems: list[Problem] = []
    wanted: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = (part.strip() for part in entry.partition("="))
        if not name or not amount:
            problems.append(Problem(path, f"{entry[:80]!r} must have the form container=6Gi", Rule.QUANTITY))
        elif name in wanted:
            problems.append(Problem(path, f"names container {name[:63]!r} twice", Rule.QUANTITY))
        elif isinstance(size := _bytes(amount), str):
            problems.append(Problem(path, f"container {name[:63]!r}: {size}", Rule.QUANTITY))
        else:
            wanted[name] = size
    raise_if_any(problems)
    return wanted


def _bytes(text: str) -> int | str:
    """Return the amount, or why it is not valid."""
    try:
        amount = whole_bytes(text)
    except QuantityError as error:
        return str(error)
    if amount < _MIB or amount % _MIB:
        return f"must be whole MiB, at least 1Mi, not {text}"
    return amount if amount <= _MOST else f"{text} is more than any card has"


def read_sizes(annotations: Mapping[str, str]) -> Sizes:
    """Return the sizes in a pod's record. Raises BadObject if they cannot be read."""
    text = annotations.get(RESIZED)
    if text is None:
        return NO_SIZES
    found = parse_json_object(text, annotation_path(RESIZED))
    serial, rows = found.get("serial"), found.get("containers")
    if not is_integer(serial, 0, MAX_QUANTITY) or not isinstance(rows, dict):
        raise _unreadable("must have a serial number and containers")
    return Sizes(serial, {str(name): _size(name, row) for name, row in rows.items()})


def _size(name: str, row: object) -> Size:
    limit, held = (table_at(row).get(key) for key in ("limit", "held"))
    if not is_integer(limit, 1, _MOST) or not is_integer(held, limit, _MOST):
        raise _unreadable(f"container {name[:63]!r}: limit and held must be bytes, and held at least as many")
    return Size(limit, held)


def _unreadable(message: str) -> BadObject:
    return BadObject([Problem(annotation_path(RESIZED), message)])


def write_sizes(sizes: Sizes) -> dict[str, str]:
    rows = {name: {"limit": size.limit, "held": size.held} for name, size in sorted(sizes.containers.items())}
    return {RESIZED: json.dumps({"serial": sizes.serial, "containers": rows}, separators=(",", ":"))}


def read_applied(annotations: Mapping[str, str]) -> Applied:
    """Return what the agent has put into force. A text that no agent writes counts as none."""
    try:
        found = parse_json_object(annotations.get(APPLIED, "{}"), annotation_path(APPLIED))
    except BadObject:
        return NOT_APPLIED
    serial, names = found.get("serial"), found.get("containers")
    if not is_integer(serial, 0, MAX_QUANTITY) or not isinstance(names, list):
        return NOT_APPLIED
    return Applied(serial, frozenset(map(str, names)))


def write_applied(applied: Applied) -> dict[str, str]:
    content = {"serial": applied.serial, "containers": sorted(applied.containers)}
    return {APPLIED: json.dumps(content, separators=(",", ":"))}


def held_shares(shares: Iterable[Share], sizes: Sizes) -> tuple[Share, ...]:
    """Return the shares with the memory that the ledger holds."""
    held = {name: size.held for name, size in sizes.containers.items()}
    return tuple(_with_memory(share, held) for share in shares)


def limited_shares(shares: Iterable[Share], sizes: Sizes) -> tuple[Share, ...]:
    """Return the shares with the memory to which the containers must be limited."""
    limits = {name: size.limit for name, size in sizes.containers.items()}
    return tuple(_with_memory(share, limits) for share in shares)


def shares_with(shares: Iterable[Share], memory: Mapping[str, int]) -> tuple[Share, ...]:
    """Return the shares with these amounts of memory, by container."""
    return tuple(_with_memory(share, memory) for share in shares)


def _with_memory(share: Share, memory: Mapping[str, int]) -> Share:
    if share.container not in memory or not is_resizable(share):
        return share
    # A percentage of 0 is computed from the bytes (`amount_of`).
    return replace(share, memory=memory[share.container], ratio=None if share.ratio is None else 0)


def is_resizable(share: Share) -> bool:
    """Return whether a container can have more or less memory than this share: a part of a card, while it runs."""
    return share.type == GPU and not share.whole and share.stage is not Stage.INIT


@dataclass(frozen=True, slots=True)
class Step:
    """What the scheduler writes next.

    Attributes:
        sizes: The sizes. If they are equal to the present ones, there is nothing to write.
        refused: Why containers do not get what is wanted, by container.
    """

    sizes: Sizes
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)


def next_step(
    sizes: Sizes,
    applied: Applied,
    wanted: Mapping[str, int],
    requested: Mapping[str, int],
    no_room: Callable[[Mapping[str, int]], str | None],
) -> Step:
    """Return the next step of the resizes of one pod.

    A container that is no longer mentioned in `wanted` keeps what the ledger holds for it.

    Args:
        sizes: The present sizes.
        wanted: The wanted bytes by container.
        requested: The bytes that each container that may be resized requests, on each of its cards.
        no_room: A function that returns why the cards have no room for these amounts by container, or None.
    """
    before = {name: sizes.containers.get(name, Size(amount, amount)) for name, amount in sorted(requested.items())}
    is_in_force = applied.serial == sizes.serial
    after = {name: Size(size.limit, size.limit) if is_in_force else size for name, size in before.items()}
    refused: dict[str, str] = {}
    for name, size in after.items():
        limit = wanted.get(name, size.held)
        if limit == size.limit or name not in applied.containers:
            continue
        held = max(size.held, limit)
        reason = no_room({**{n: s.held for n, s in after.items()}, name: held}) if held > size.held else None
        if reason is None:
            after[name] = Size(limit, held)
        else:
            refused[name] = reason
    is_changed = any(after[name].limit != before[name].limit for name in before)
    written = {name: size for name, size in after.items() if name in sizes.containers or size != before[name]}
    return Step(Sizes(sizes.serial + is_changed, {**sizes.containers, **written}), refused)
