"""Reads and writes the slices of a node in the annotations of its Node object.

The scheduler (`scheduler.partitioning`) writes the partition plan (`spec-…`), and the node's agent
(`deviceplugin.partitioning`) writes the existing slices (`status-…`). Both write into the annotation `dynamicgpuslice`,
whose format comes from nebuly's project nos. Each of them also writes an annotation of mgpu's own with the positions of
the slices, because the positions determine which further slices can be created (docs/design/slices.md, "Node
annotation"). Other programs may read the annotations, so the formats must not change. The functions that read them
limit the size, because they do not trust the writer.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu.model.cards import WHOLE_CORE, Card
from mgpu.model.device_object import MAX_GPUS
from mgpu.model.errors import BadObject, Problem, raise_if_any
from mgpu.model.ledger import Share
from mgpu.model.mig import layout_of
from mgpu.model.pods import Node
from mgpu.model.quantities import MAX_QUANTITY
from mgpu.model.raw_objects import annotation_path, is_integer, parse_json_object
from mgpu.model.slice_names import (
    MAX_MPS_CLIENTS,
    MIG,
    MIG_CLAIMS,
    MPS,
    PLACES,
    Slice,
    SliceCounts,
    device_type,
    gigabytes,
    mode_of,
    read_name,
)

LABEL = "gpu.partitioning"
MODES = (MIG, MPS, MIG_CLAIMS)
"""The values of the label."""
ANNOTATION = "dynamicgpuslice"
EXISTING = "mgpu.io/slices"
"""The agent's annotation: `{"cards": {"0": [{"profile", "start", "uuid", "pod"}]}, "refused": {"plan", "why"}}`."""
PLANNED = "mgpu.io/slices-planned"
"""The scheduler's annotation: `{"plan": 5, "cards": {"0": [{"profile", "start", "standing"}]}}`.

`standing` is true for a slice that existed before the first plan of mgpu.
"""
_MOST_SLICES = 1024
"""The most slices of one node. 16 cards with the most MPS shares have 768. The scheduler reads all slices of a node
after each change."""
_MOST_TEXT = 256
"""The most characters of a slice's UUID and of a pod's UID."""
_MOST_REASON = 1024
"""The most characters of the reason why an agent refuses a plan."""
UNKNOWN_POD = "?"
"""The UID of an unknown pod. An agent that writes only counts does not report which pod uses a slice."""

_GIB = 1 << 30
_PATH = annotation_path(ANNOTATION)
_SPEC = re.compile(r"spec-gpu-(\d{1,9})-(.+)", re.ASCII)
_STATUS = re.compile(r"status-gpu-(\d{1,9})-(.+)-(used|free)", re.ASCII)
_SPEC_PLAN, _STATUS_PLAN = "spec-partitioning-plan", "status-partitioning-plan"


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The content of the annotation `dynamicgpuslice`.

    Attributes:
        spec: the slices of the plan.
        plan: the id of the plan in the spec; None if there is none.
        used: the existing slices that pods use.
        free: the existing slices that no pod uses.
        applied: the id of the plan that the agent applied last; None if there is none.
    """

    spec: SliceCounts = field(default_factory=dict)
    plan: int | None = None
    used: SliceCounts = field(default_factory=dict)
    free: SliceCounts = field(default_factory=dict)
    applied: int | None = None


@dataclass(frozen=True, slots=True)
class NodeSlices:
    """The slices of a node, and its partition plan.

    Attributes:
        mode: the value of the node's label `gpu.partitioning`: MIG, MPS or MIG_CLAIMS; "" without the label. Under
            MIG_CLAIMS there is no plan, and `existing` has only the instances that were not created for claims, because
            ResourceClaims say which other ones exist. No pod can get these.
        cards: the indexes of the cards that can be partitioned now: under MIG and MIG_CLAIMS the cards in MIG mode,
            under MPS the cards with slices.
        planned: the slices of the plan with their positions; None if the positions are unknown, for example because
            another program wrote the plan, with counts alone.
        refused: the id of the plan that the agent could not apply, and the reason; None if there is none.
        has_positions: whether the agent reports the positions of the slices, and not only their numbers. Under
            MIG_CLAIMS, whether it reports anything.
        preexisting: the slices of the plan that existed before the first plan of mgpu.
    """

    mode: str = ""
    partitioning: Partitioning = Partitioning()
    existing: tuple[Slice, ...] = ()
    cards: frozenset[int] = frozenset()
    planned: tuple[Slice, ...] | None = None
    refused: tuple[int, str] | None = None
    has_positions: bool = True
    preexisting: frozenset[Slice] = frozenset()

    @property
    def has_pending_plan(self) -> bool:
        """Whether the agent still has to apply the plan. A plan that the agent has refused is not pending."""
        plan = self.partitioning.plan
        return plan is not None and plan != self.partitioning.applied and not (self.refused and self.refused[0] == plan)

    @property
    def available(self) -> tuple[Slice, ...]:
        """The slices that pods can get now: those that exist and remain under the plan."""
        if self.partitioning.plan in (None, self.partitioning.applied):
            return self.existing
        if self.planned is not None:
            remaining = {s.place for s in self.planned}
            return tuple(s for s in self.existing if s.place in remaining)
        counts = {(card, name): n for card, names in self.partitioning.spec.items() for name, n in names.items()}
        found = []
        for s in sorted(self.existing, key=lambda s: (not s.pod, s)):  # keep slices in use rather than idle ones
            if counts.get((s.card, s.name), 0) > 0:
                counts[s.card, s.name] -= 1
                found.append(s)
        return tuple(sorted(found))

    @property
    def foreign_slices(self) -> frozenset[Slice]:
        """The slices that certainly do not come from a plan of mgpu, without their UUIDs and pods.

        While a plan is pending, a slice that is not in it is left out, since an earlier plan may have had it.
        """
        made = frozenset(s.place for s in self.existing)
        if self.planned is None:
            return made
        in_force = self.partitioning.plan == self.partitioning.applied
        return self.preexisting | (made.difference(self.planned) if in_force else frozenset())


NO_SLICES = NodeSlices()


def read_slices(node: Node) -> NodeSlices:
    """Return the slices of a node, or `NO_SLICES` if it does not have the label.

    Slices of the other mode are ignored, since they date from before a change of the label. Raises BadObject if the
    label or an annotation is invalid.
    """
    mode = node.labels.get(LABEL, "")
    if not mode:
        return NO_SLICES
    if mode not in MODES:
        allowed = f"{MIG}, {MPS} or {MIG_CLAIMS}"
        raise BadObject([Problem(f"metadata.labels[{LABEL}]", f"must be {allowed}, not {mode!r}")])
    if mode == MIG_CLAIMS:
        return _read_beside_claims(node)
    partitioning = _of_mode(read_partitioning(node.annotations.get(ANNOTATION)), mode)
    made, cards, refused = _read_made(node.annotations.get(EXISTING))
    planned, standing = _read_planned(node.annotations.get(PLANNED), partitioning.plan)
    if any(mode_of(s.name) != mode for s in made or ()):
        made, cards = None, frozenset()
    if any(mode_of(s.name) != mode for s in planned or ()):
        planned, standing = None, frozenset()
    placed = made is not None
    if made is None:
        made = _counted(partitioning)
        cards = frozenset(s.card for s in made)
    return NodeSlices(mode, partitioning, made, cards, planned, refused, placed, standing)


def _read_beside_claims(node: Node) -> NodeSlices:
    """Return the slices of a node whose MIG instances claims get.

    Until the agent has seen the label, the annotation is about the plan of the former mode. No pod can get its free
    slices any more.
    """
    made, cards, _ = _read_made(node.annotations.get(EXISTING))
    of_mig = [s for s in made or () if mode_of(s.name) == MIG]
    kept = tuple(replace(s, pod=s.pod or UNKNOWN_POD) for s in of_mig)
    is_known = made is not None and len(of_mig) == len(made)
    return NodeSlices(MIG_CLAIMS, existing=kept, cards=cards if is_known else frozenset(), has_positions=is_known)


def _of_mode(found: Partitioning, mode: str) -> Partitioning:
    spec, used, free = (
        {card: own for card, names in counts.items() if (own := {n: c for n, c in names.items() if mode_of(n) == mode})}
        for counts in (found.spec, found.used, found.free)
    )
    return Partitioning(spec, found.plan, used, free, found.applied)


def _counted(found: Partitioning) -> tuple[Slice, ...]:
    """Return the slices of an agent that writes only counts.

    Their positions are unknown, so `start` only numbers the slices of a card, beginning with those in use.
    """
    applied = found.plan is not None and found.plan == found.applied
    slices = []
    for card in sorted({*found.used, *found.free, *(found.spec if applied else ())}):
        used, free, spec = (dict(counts.get(card, {})) for counts in (found.used, found.free, found.spec))
        if applied and not found.free:
            free = {name: count - used.get(name, 0) for name, count in spec.items()}
        names = [name for name in sorted(used) for _ in range(used[name])]
        pods = [UNKNOWN_POD] * len(names)
        names += [name for name in sorted(free) for _ in range(free[name])]
        pods += [""] * (len(names) - len(pods))
        slices += [Slice(card, i, name, pod=pod) for i, (name, pod) in enumerate(zip(names, pods, strict=True))]
    return tuple(slices)


# The annotation `dynamicgpuslice`, into which both the scheduler and the agent write.


def read_partitioning(text: str | None) -> Partitioning:
    """Return the content of the annotation, ignoring unknown keys. Raises BadObject with the path of each problem."""
    problems: list[Problem] = []
    spec: dict[int, dict[str, int]] = {}
    used: dict[int, dict[str, int]] = {}
    free: dict[int, dict[str, int]] = {}
    plans: dict[str, int] = {}
    for key, value in _parse(text).items():
        in_spec = _SPEC.fullmatch(key)
        in_status = _STATUS.fullmatch(key)
        if key not in (_SPEC_PLAN, _STATUS_PLAN) and not in_spec and not in_status:
            continue
        if not is_integer(value, 0, MAX_QUANTITY):
            problems.append(Problem(f"{_PATH}[{key}]", f"must be an integer of at least 0, not {value!r}"))
        elif match := in_spec or in_status:
            name = read_name(match[2])
            if name is None:
                problems.append(
                    Problem(f"{_PATH}[{key}]", f"{match[2]!r} is not the name of a slice such as 2g.20gb or 4gb")
                )
            # A count of 0 free slices is kept: it shows that the agent reports free slices (`_counted`).
            elif value or (in_status and match[3] == "free"):
                counts = spec if in_spec else {"used": used, "free": free}[match[3]]
                card = counts.setdefault(int(match[1]), {})
                card[name] = card.get(name, 0) + value
        else:
            plans[key] = value
    problems += (*_excess("spec", spec), *_excess("status", used, free))
    raise_if_any(problems)
    return Partitioning(spec, plans.get(_SPEC_PLAN), used, free, plans.get(_STATUS_PLAN))


def _excess(what: str, *counts: SliceCounts) -> Iterator[Problem]:
    cards = sorted({card for of in counts for card in of})
    if len(cards) > MAX_GPUS:
        text = f"names {len(cards)} cards in its {what}, but a node has at most {MAX_GPUS}"
        yield Problem(_PATH, text)
        return
    count = 0
    for card in cards:
        total = sum(sum(of.get(card, {}).values()) for of in counts)
        count += min(total, MAX_MPS_CLIENTS)
        if total > MAX_MPS_CLIENTS:
            text = f"has {total} slices of card {card} in its {what}, but a card has at most {MAX_MPS_CLIENTS}"
            yield Problem(_PATH, text)
    if count > _MOST_SLICES:
        text = f"has {count} slices in its {what}, but a node has at most {_MOST_SLICES}"
        yield Problem(_PATH, text)


def with_spec(text: str | None, spec: SliceCounts, plan: int) -> str:
    """Return `text`, the value of the annotation, with its spec replaced. Raises BadObject if `text` is invalid."""
    written = {f"spec-gpu-{card}-{name}": n for card, names in spec.items() for name, n in names.items() if n}
    return _rewritten(text, _SPEC, _SPEC_PLAN, written | {_SPEC_PLAN: plan})


def with_status(text: str | None, slices: Iterable[Slice], applied: int | None) -> str:
    """Return `text`, the value of the annotation, with its status replaced. Raises BadObject if `text` is invalid.

    Args:
        applied: the id of the plan that is applied; None leaves the id unchanged.
    """
    counts = Counter((s.card, s.name, "used" if s.pod else "free") for s in slices)
    written = {f"status-gpu-{card}-{name}-{what}": n for (card, name, what), n in counts.items()}
    if applied is None:
        applied = read_partitioning(text).applied
    return _rewritten(text, _STATUS, _STATUS_PLAN, written | ({} if applied is None else {_STATUS_PLAN: applied}))


def next_plan(before: int | None, now: int) -> int:
    """Return the id of the next plan: `now`, the time in seconds since 1970, or `before` + 1 if that is larger.

    Args:
        before: the id of the last plan; None if there is none.
    """
    return max((before or 0) + 1, now)


def _rewritten(text: str | None, owned: re.Pattern[str], plan: str, written: Mapping[str, int]) -> str:
    others = {key: value for key, value in _parse(text).items() if key != plan and not owned.fullmatch(key)}
    return json.dumps(dict(sorted({**others, **written}.items())))


def _parse(text: str | None) -> dict[str, Any]:
    return parse_json_object(text, _PATH) if text else {}


# The annotations with the positions of the slices.


def write_existing(slices: Iterable[Slice], cards: Iterable[int], refused: tuple[int, str] | None) -> str:
    """Return the value of the annotation `EXISTING`. `cards` and `refused` are as in `NodeSlices`."""
    rows: dict[str, list[dict[str, Any]]] = {str(card): [] for card in sorted({*cards})}
    for s in sorted(slices):
        row = {"profile": s.name, "start": s.start, "uuid": s.uuid, "pod": s.pod}
        rows.setdefault(str(s.card), []).append({key: value for key, value in row.items() if value != ""})
    value: dict[str, Any] = {"cards": rows}
    if refused:
        value["refused"] = {"plan": refused[0], "why": refused[1]}
    return json.dumps(value)


def write_planned(slices: Iterable[Slice], plan: int, preexisting: Collection[Slice] = ()) -> str:
    """Return the value of the annotation `PLANNED`. `preexisting` is as in `NodeSlices`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for s in sorted(slices):
        row: dict[str, Any] = {"profile": s.name, "start": s.start}
        rows.setdefault(str(s.card), []).append({**row, "standing": True} if s.place in preexisting else row)
    return json.dumps({"plan": plan, "cards": rows})


def _read_made(text: str | None) -> tuple[tuple[Slice, ...] | None, frozenset[int], tuple[int, str] | None]:
    if text is None:
        return None, frozenset(), None
    found = parse_json_object(text, annotation_path(EXISTING))
    slices, cards = _read_cards(found.get("cards"), EXISTING)
    refused = found.get("refused")
    if refused is None:
        return slices, cards, None
    if not isinstance(refused, dict) or not isinstance(refused.get("plan"), int):
        raise BadObject([Problem(f"metadata.annotations[{EXISTING}].refused", "must have plan and why")])
    return slices, cards, (refused["plan"], str(refused.get("why", ""))[:_MOST_REASON])


def _read_planned(text: str | None, plan: int | None) -> tuple[tuple[Slice, ...] | None, frozenset[Slice]]:
    """Return `NodeSlices.planned` and `NodeSlices.preexisting` for the plan with the id `plan`.

    The former is None if the annotation is about another plan, because other programs that write a plan into
    `dynamicgpuslice` do not write this annotation.
    """
    found = {} if text is None or plan is None else parse_json_object(text, annotation_path(PLANNED))
    if not found or found.get("plan") != plan:
        return None, frozenset()
    slices, _ = _read_cards(found.get("cards"), PLANNED)
    standing = {
        (int(card), row.get("start")) for card, rows in found["cards"].items() for row in rows if row.get("standing")
    }
    return slices, frozenset(s for s in slices if (s.card, s.start) in standing)


def _read_cards(rows: object, annotation: str) -> tuple[tuple[Slice, ...], frozenset[int]]:
    path = f"metadata.annotations[{annotation}].cards"
    if not isinstance(rows, dict) or not all(re.fullmatch(r"\d{1,3}", str(card), re.ASCII) for card in rows):
        raise BadObject([Problem(path, "must be an object whose keys are card indexes")])
    if len(rows) > MAX_GPUS:
        raise BadObject([Problem(path, f"has {len(rows)} cards, but a node has at most {MAX_GPUS}")])
    total = sum(len(listed) for listed in rows.values() if isinstance(listed, list))
    if total > _MOST_SLICES:
        raise BadObject([Problem(path, f"has {total} slices, but a node has at most {_MOST_SLICES}")])
    problems: list[Problem] = []
    found: list[Slice] = []
    for card, listed in rows.items():
        if isinstance(listed, list) and len(listed) > MAX_MPS_CLIENTS:
            text = f"has {len(listed)} slices, but a card has at most {MAX_MPS_CLIENTS}"
            problems.append(Problem(f"{path}[{card}]", text))
            continue
        for i, row in enumerate(listed if isinstance(listed, list) else [None]):
            read = _read_row(int(card), row)
            if read is None:
                text = f"must have a profile (the name of a slice) and a start (an integer below {PLACES})"
                problems.append(Problem(f"{path}[{card}][{i}]", text))
            else:
                found.append(read)
    taken = Counter((s.card, s.start) for s in found)
    problems += (
        Problem(f"{path}[{card}]", f"has two slices that start at {start}")
        for (card, start), n in sorted(taken.items())
        if n > 1
    )
    raise_if_any(problems)
    return tuple(sorted(found)), frozenset(map(int, rows))


def _read_row(card: int, row: object) -> Slice | None:
    if not isinstance(row, dict):
        return None
    name, start, uuid, pod = (row.get(key, "") for key in ("profile", "start", "uuid", "pod"))
    if not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in (name, uuid, pod)):
        return None
    if not is_integer(start, 0, PLACES - 1):
        return None
    named = read_name(name)
    return Slice(card, start, named, uuid, pod) if named else None


# Slices as devices of the ledger.


def slice_devices(found: NodeSlices, gpus: Sequence[Card]) -> tuple[Card, ...]:
    """Return the slices that pods can get, as devices with their part of the card's core and memory.

    Slices in use by an unknown pod are left out.
    """
    by_index = {card.index: card for card in gpus}
    return tuple(
        _device(s, card, found)
        for s in found.available
        if s.pod != UNKNOWN_POD and (card := by_index.get(s.card)) is not None
    )


def _device(s: Slice, card: Card, found: NodeSlices) -> Card:
    if mode_of(s.name) == MPS:
        memory = gigabytes(s.name) * _GIB
        core = min(WHOLE_CORE, WHOLE_CORE * memory // max(1, card.memory))
    else:
        layout = layout_of(card.model, card.memory)
        profile = layout.profile(s.name) if layout else None
        memory = card.memory * profile.size // layout.slices if layout and profile else 0
        core = WHOLE_CORE * profile.compute // layout.compute if layout and profile else 0
    uuid = s.uuid or f"{card.uuid}/{s.name}/{s.start}"
    # The placement engine takes devices in the order of their minors. If it takes the instance with the highest start
    # first, more ways to partition the rest of the card remain: 96 % of the orders of arrival that can be served are
    # served, and 79 % if it takes the lowest start first (docs/design/slices.md, "Choosing a geometry").
    last_first = found.mode == MIG and found.has_positions
    minor = s.card * PLACES + (PLACES - 1 - s.start if last_first else s.start)
    return Card(s.index, uuid, card.model, memory, core, card.healthy, card.numa, minor, device_type(s.name))


def unpartitioned_cards(found: NodeSlices, gpus: Iterable[Card]) -> tuple[Card, ...]:
    """Return the cards that are not partitioned, which pods of other vocabularies can use.

    Under MIG and MIG_CLAIMS these are the cards that do not support MIG, and under MPS the cards without existing or
    planned slices.
    """
    if not found.mode:
        return tuple(gpus)
    partitioned = {*found.cards, *(s.card for s in found.existing), *found.partitioning.spec}
    mig = found.mode in (MIG, MIG_CLAIMS)
    return tuple(c for c in gpus if c.index not in partitioned and not (mig and layout_of(c.model, c.memory)))


def shares_by_pod(found: NodeSlices) -> dict[str, tuple[Share, ...]]:
    """Return the shares of the slices that pods use according to the node's agent, by the UID of the pod."""
    shares: dict[str, list[Share]] = {}
    for s in found.existing:
        if s.pod not in ("", UNKNOWN_POD):
            shares.setdefault(s.pod, []).append(Share("", s.index, whole=True, type=device_type(s.name)))
    return {uid: tuple(slices) for uid, slices in shares.items()}
