"""Reads the input of `mgpu simulate`: nodes with their cards, claims, running pods, and pods to place.

`read_world` checks and sorts the documents. Every error must name the document in which it was found.
`simulate_command` calls `read_world`.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mgpu import dialects
from mgpu.dialects.mtgpu import KIND
from mgpu.model import device_object
from mgpu.model.cards import Card
from mgpu.model.compute_resources import allocatable, requests_of
from mgpu.model.device_checkpoints import read_entries, shares_by_pod
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.pods import read_node, read_pod
from mgpu.model.quantities import QuantityError
from mgpu.presentation.overview import mark_unhealthy
from mgpu.settings import Settings
from playground.simulate.claim_files import KINDS, ClaimObjects, read_claim_objects
from playground.simulate.documents import Document, Raw

CARDS_ANNOTATION = "mgpu.io/cards"
"""The annotation of a Node that lists its cards as JSON. A node that has it needs no Device."""
_CARDS_PATH = f"metadata.annotations[{CARDS_ANNOTATION}]"


@dataclass(slots=True)
class World:
    """The objects of the documents.

    Attributes:
        nodes: The Nodes, by name.
        cards: The cards of each node, by the name of the node.
        given: For each node, the shares that the kubelet chose for pods, by the UID of the pod. They come from the
            kubelet's checkpoint, whose entries a Device contains.
        running: The pods with a node, in the order of the files.
        submitted: The other pods, and the MtgpuPods that have no card and have not ended, in the order of the files.
        mtgpupods: The MtgpuPods that have a card or have ended.
        claims: The ResourceClaims, their templates and the DeviceClasses.
    """

    nodes: dict[str, Raw] = field(default_factory=dict)
    cards: dict[str, tuple[Card, ...]] = field(default_factory=dict)
    given: dict[str, dict[str, tuple[Share, ...]]] = field(default_factory=dict)
    running: list[Raw] = field(default_factory=list)
    submitted: list[Raw] = field(default_factory=list)
    mtgpupods: list[Raw] = field(default_factory=list)
    claims: ClaimObjects = field(default_factory=ClaimObjects)


def read_world(documents: Iterable[Document], note: Callable[[str], None], settings: Settings) -> World:
    """Return the objects of the documents, sorted by their use. Raises BadObject with the first problem.

    Args:
        note: Receives a line for every object that has no effect, except for ConfigMaps that are no list of unhealthy
            cards.
    """
    found = list(documents)
    world = World()
    for document in _of_kind(found, "Node"):
        _add_node(world, document)
    for document in _of_kind(found, "Device"):
        _add_device(world, document)
    for name in world.nodes:
        world.cards.setdefault(name, dialects.cards_from_capacity(read_node(world.nodes[name]), settings))
    for document in _of_kind(found, "ConfigMap"):
        _mark_unhealthy_cards(world, document, note)
    world.claims = read_claim_objects(found, world.nodes)
    seen: dict[tuple[str, str, str], str] = {}
    for document in found:
        pods = _pods(document)
        if pods is None and document.kind not in ("Node", "Device", "ConfigMap", *KINDS):
            note(f"{document.where}: {document.kind} {document.name} is ignored: it has no effect on a simulation")
        for raw in pods or ():
            _add_pod(world, document, raw, seen)
    return world


def _of_kind(documents: Iterable[Document], kind: str) -> list[Document]:
    return [document for document in documents if document.kind == kind]


def _add_node(world: World, document: Document) -> None:
    try:
        node = read_node(document.raw)
        allocatable(document.raw)
    except BadObject as error:
        raise document.error_from(error) from error
    except QuantityError as error:
        raise document.error_at("status.allocatable", str(error)) from error
    if not node.name:
        raise document.error_at("metadata.name", "is missing")
    if node.name in world.nodes:
        raise document.error_at("metadata.name", f"a node named {node.name} exists already")
    world.nodes[node.name] = document.raw
    listed = node.annotations.get(CARDS_ANNOTATION)
    if listed is not None:
        try:
            world.cards[node.name] = device_object.read_card_list(json.loads(listed), node.name, _CARDS_PATH)
        except ValueError as error:
            raise document.error_at(_CARDS_PATH, f"is not JSON: {error}") from error
        except BadObject as error:
            raise document.error_from(error) from error


def _add_device(world: World, document: Document) -> None:
    name = document.name
    if name not in world.nodes:
        raise document.error_at("metadata.name", f"a Device needs a Node of its name; there is none named {name!r}")
    if name in world.cards:
        other = f"the Node's annotation {CARDS_ANNOTATION}"
        if CARDS_ANNOTATION not in (world.nodes[name]["metadata"].get("annotations") or {}):
            other = "another Device of its name"
        raise document.error_at("metadata.name", f"the cards of {name} are defined in {other} already")
    try:
        world.cards[name] = device_object.read_device(document.raw)
        world.given[name] = shares_by_pod(read_entries(document.raw))
    except BadObject as error:
        raise document.error_from(error) from error


def _mark_unhealthy_cards(world: World, document: Document, note: Callable[[str], None]) -> None:
    """Mark the cards that a list of unhealthy cards names (docs/design/gpushare.md). A malformed list marks no card."""
    listed = dialects.unhealthy_list_of(document.raw)
    if listed is None or listed[0] not in world.cards:
        return
    node, lists = listed
    try:
        world.cards[node] = mark_unhealthy(world.cards[node], lists.cards_of(document.raw))
    except BadObject as error:
        note(f"{document.where}: ConfigMap {document.name} marks no card: {error}")


def _add_pod(world: World, document: Document, raw: Raw, seen: dict[tuple[str, str, str], str]) -> None:
    """Check a pod and add it to the world. Raises BadObject.

    Args:
        seen: The place of each pod so far, by its kind, namespace and name. The new pod is added.
    """
    named = raw["kind"] == KIND
    try:
        pod = read_pod(raw)
        if pod.node and not named:  # for other pods, the simulated admission rejects a malformed amount
            requests_of(raw)
    except BadObject as error:
        raise document.error_from(error) from error
    except QuantityError as error:
        raise document.error_at("spec.containers", str(error)) from error
    if not pod.name:
        raise document.error_at("metadata.name", "is missing")
    if not pod.containers and not named:
        raise document.error_at("spec.containers", "a pod needs at least one container")
    key = (raw["kind"], pod.namespace, pod.name)
    if key in seen:
        kind = f"an {KIND}" if named else "a pod"
        raise document.error_at("metadata.name", f"{kind} named {pod.key} exists already, in {seen[key]}")
    seen[key] = document.where
    if pod.node and pod.node not in world.nodes:
        raise document.error_at("spec.nodeName", f"no node is named {pod.node!r}")
    if named:
        bound = (raw.get("status") or {}).get("BoundDeviceID")
        (world.mtgpupods if bound or pod.ended else world.submitted).append(raw)
    else:
        (world.running if pod.node else world.submitted).append(raw)


def _pods(document: Document) -> list[Raw] | None:
    """Return the pods that an object describes, each with a namespace, a name and a UID.

    Return None if the object is neither a pod nor a workload.
    """
    raw, kind = document.raw, document.kind
    if kind in ("Pod", KIND):
        meta = raw["metadata"]
        name = meta.get("name") or (f"{meta['generateName']}0" if meta.get("generateName") else None)
        return [_complete(raw, meta, name)]
    if kind not in ("Deployment", "ReplicaSet", "StatefulSet", "Job"):
        return None
    spec = raw.get("spec")
    template = spec.get("template") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(template, dict):
        raise document.error_at("spec.template", "is missing")
    namespace = raw["metadata"].get("namespace")
    meta = {**(template.get("metadata") or {}), **({"namespace": namespace} if namespace else {})}
    return [
        _complete({"apiVersion": "v1", "kind": "Pod", "spec": template.get("spec")}, meta, f"{document.name}-{i}")
        for i in range(_replicas(document, spec))
    ]


def _replicas(document: Document, spec: Raw) -> int:
    """Return how many pods of a workload run at a time. The default is 1 (apps/v1, batch/v1)."""
    limits = ("parallelism", "completions") if document.kind == "Job" else ("replicas",)
    counts = [spec[key] for key in limits if spec.get(key) is not None]
    for key in limits:
        value = spec.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 100_000):
            raise document.error_at(f"spec.{key}", f"must be an integer from 0 to 100000, not {value!r}")
    return 1 if spec.get(limits[0]) is None else min(counts)


def _complete(raw: Raw, meta: Raw, name: Any) -> Raw:
    """Return the pod with this name.

    A missing namespace becomes `default`, and a missing UID is made from the namespace and the name.
    """
    namespace = meta.get("namespace") or "default"
    own = f"{namespace}/{name}"
    uid = meta.get("uid") or (f"{KIND}/{own}" if raw["kind"] == KIND else own)
    return {**raw, "metadata": {**meta, "namespace": namespace, "name": name, "uid": uid}}
