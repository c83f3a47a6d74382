"""Renders nodes and waiting pods as JSON for the web page. The functions are pure.

`feed` and `waiting_list` call them. `static/store.js` reads the objects, so change it together with this module. The
page keeps all nodes, which may be thousands, so `node_json` returns only what the page draws. `detail_json` returns
everything about the one node that a user opens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Ledger
from mgpu.model.pod_constraints import NO_CONSTRAINTS
from mgpu.model.pods import Pod
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import (
    CardUse,
    CardView,
    NodePartitions,
    NodeView,
    list_allocatable,
    nodes_json,
    view_nodes,
    with_isolation,
)
from mgpu.presentation.claim_views import holder_name
from mgpu.presentation.gang_views import GangView, describe_gang
from mgpu.presentation.mtgpupod_tables import MtgpuView
from mgpu.presentation.overview import slice_annotations
from mgpu.presentation.request_text import describe_request
from mgpu.presentation.slice_bars import divide_bar
from scheduler.cluster.node_snapshots import NodeContents
from scheduler.decisions.filter import Filtered
from scheduler.engine import nvidia_plugin

Json = dict[str, Any]
PARTS = 1000
"""The width of a card, in the units of the positions and widths of its slices."""
_EXAMPLES = 3
"""The maximum number of nodes that `why_json` names as examples of a reason."""
_MOST_MEMBERS = 100
"""The maximum number of members of a gang for which the page can search."""
_MOST_REASONS = 12
"""The maximum number of reasons that `why_json` lists. All further reasons share one entry."""


def view_of(contents: NodeContents) -> NodeView:
    """Return the node as `mgpu inspect` shows it."""
    ledger, name = Ledger(), contents.node.name
    ledger.set_cards(name, list_allocatable(contents.slices, (*contents.cards, *contents.other_devices)))
    for holding in contents.held:
        ledger.hold(holding)
    annotations = slice_annotations(contents.node, contents.slices)
    (view,) = view_nodes(ledger, {name: NodePartitions(contents.slices, contents.cards, annotations)})
    return with_isolation(view, contents.node)


def node_json(contents: NodeContents) -> Json:
    """Return a node as `{"name", "note"?, "nvidia"?, "pods": [{"name", "dialect", …}], "cards": […], "others"?: […]}`.

    Keys with `?` are left out if their value is false or empty. `nvidia` says that NVIDIA's device plugin serves the
    whole cards of the node. `others` are its devices that are not GPUs; each has the keys of a card, and `type`. A pod
    has `reserved` if it is not bound yet, `unsure` if its cards are unknown, and `keeps` with the GPUID if it is an
    occupy pod. A card is `{"index",
    "model", "core": [used, all], "memory": [used, all], "uses"}`, with core in thousandths of a card and memory in
    bytes. A use is `[position in "pods", core, memory]`. A card may also have `unhealthy`, `gpuid`, `cut` (how it is
    partitioned) and `slices`. A slice is `[name, left, width, position in "pods" or -1]`; a card is PARTS wide.
    """
    view = view_of(contents)
    unsure = {use.pod for device in view.devices for use in device.uses if not use.certain}
    keeps = {use.pod: use.occupies for device in view.devices for use in device.uses if use.occupies}
    dialects = {use.pod: use.dialect for device in view.devices for use in device.uses}
    reserved = {holder_name(holding) for holding in contents.held if not holding.bound}
    number = {pod: i for i, pod in enumerate(dialects)}
    pods = [
        {"name": pod, "dialect": dialect}
        | ({"reserved": True} if pod in reserved else {})
        | ({"unsure": True} if pod in unsure else {})
        | ({"keeps": keeps[pod]} if pod in keeps else {})
        for pod, dialect in dialects.items()
    ]
    return {
        "name": view.name,
        **_if(note=contents.problem or view.note, nvidia=nvidia_plugin.is_on_node(contents.node)),
        "pods": pods,
        "cards": [_card(card, number) for card in view.cards],
        **_if(others=[{"type": card.state.card.type, **_card(card, number)} for card in view.others]),
    }


def _card(view: CardView, number: Mapping[str, int]) -> Json:
    state, card = view.state, view.state.card
    return {
        "index": card.index,
        "model": card.model,
        "core": [state.core_used, card.core],
        "memory": [state.memory_used, card.memory],
        "uses": [[number[use.pod], use.core, use.memory] for use in view.uses],
        **_if(unhealthy=not card.healthy, gpuid=state.gpuid, cut=view.mode, slices=list(_slices(view, number))),
    }


def _slices(view: CardView, number: Mapping[str, int]) -> Iterator[list[Any]]:
    left = 0
    for stretch in divide_bar(view, PARTS) if view.slices else ():
        if stretch.slice:
            user = next((number[use.pod] for use in stretch.slice.uses if use.pod in number), -1)
            yield [stretch.slice.slice.name, left, stretch.cells, user]
        left += stretch.cells


def detail_json(contents: NodeContents) -> Json:
    """Return a node with all details of its cards and other devices.

    Each card or device has the keys that it has in the output of `mgpu inspect -o json`, and also `model`, `numa`,
    `minor`, `cut` and `uses`.
    """
    view = view_of(contents)
    rows = nodes_json([view])[view.name]["cards"]
    reserved = {holder_name(holding) for holding in contents.held if not holding.bound}
    for row, device in zip(rows, view.devices, strict=True):
        card = device.state.card
        row |= {"model": card.model, "numa": card.numa, "minor": card.minor, "cut": device.mode}
        row["uses"] = [_use(use, reserved=use.pod in reserved) for use in device.uses]
    return {"name": view.name, "note": contents.problem or view.note, "cards": rows}


def _use(use: CardUse, *, reserved: bool) -> Json:
    return {
        "pod": use.pod,
        "containers": list(use.containers),
        "core": use.core,
        "memory": use.memory,
        "dialect": use.dialect,
        "certain": use.certain,
        "reserved": reserved,
        "keeps": use.occupies,
        "wishes": str(use.constraints) if use.constraints != NO_CONSTRAINTS else "",
    }


def why_json(result: Filtered, now: int) -> Json:
    """Return why a pod waits, the most frequent reason first.

    The object is `{"fits", "of", "recut", "reasons": [{"text", "nodes", "examples"}], "at"}`. `fits` is the number of
    nodes on which the pod fits, `of` is the number of all nodes that the filter was asked about, and `recut` is the
    number of nodes on which the pod would fit if their cards were partitioned again. `nodes` is the number of nodes
    with a reason, and `examples` names some.

    Args:
        now: The time of the answer in seconds since 1970, which becomes `at`.
    """
    by_text: dict[str, list[str]] = {}
    for name, text in (*result.failed.items(), *result.hopeless.items()):
        by_text.setdefault(text, []).append(name)
    ordered = sorted(by_text.items(), key=lambda row: (-len(row[1]), row[0]))
    rows = [
        {"text": text, "nodes": len(names), "examples": sorted(names)[:_EXAMPLES]}
        for text, names in ordered[:_MOST_REASONS]
    ]
    more = sum(len(names) for _, names in ordered[_MOST_REASONS:])
    if more:
        text = f"{len(ordered) - _MOST_REASONS} other reasons"
        rows.append({"text": text, "nodes": more, "examples": []})
    fits, refused = len(result.passed), len(result.failed) + len(result.hopeless)
    return {"fits": fits, "of": fits + refused, "recut": len(result.repartitionable), "reasons": rows, "at": now}


def reason_json(text: str) -> Json:
    """Return an object for a reason that concerns no particular nodes.

    It has the form of `why_json`, but only the key `reasons`.
    """
    return {"reasons": [{"text": text, "nodes": 0, "examples": []}]}


def pod_json(pod: Pod, request: GpuRequest | None, why: int, gang: str = "") -> Json:
    """Return a pod that has no cards yet.

    Args:
        why: The position of its reason among the reasons of the answer, or -1 if the reason is not ready.
        gang: Its gang if that is not complete.
    """
    return {
        "name": pod.key,
        "dialect": request.dialect if request else "",
        "asks": describe_request(request) if request else "",
        "created": pod.created,
        **_if(
            node=pod.node,
            nominated=pod.nominated_node,
            gated=pod.gated,
            gang=gang,
            wishes=str(request.constraints) if request and request.constraints != NO_CONSTRAINTS else "",
        ),
        "why": why,
    }


def gang_line_json(view: GangView, now: int = 0) -> Json:
    """Return `{"name", "text", "pods", "at"?}` for a gang that is not complete.

    `pods` are the waiting members as `namespace/name`, and `at` is the time of the outlook in seconds since 1970, if
    there is one.
    """
    pods = [f"{view.name.namespace}/{pod}" for pod in (*view.waiting, *view.gated)]
    return {"name": str(view.name), "text": describe_gang(view), "pods": pods[:_MOST_MEMBERS], **_if(at=now)}


def mtgpupod_json(view: MtgpuView, why: int) -> Json:
    """Return an MtgpuPod that has no card yet.

    Args:
        why: The position of its reason among the reasons of the answer.
    """
    pod = view.pod
    return {
        "name": pod.key,
        "dialect": mtgpu.NAME,
        "asks": f"{format_core(pod.request)} and {format_bytes(pod.memory)} of the card of GPUID {pod.gpuid}",
        "created": pod.created,
        "node": pod.node,
        "why": why,
    }


def _if(**values: object) -> Json:
    """Return the values that are not false or empty."""
    return {key: value for key, value in values.items() if value}
