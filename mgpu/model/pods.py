"""Reads Pods and Nodes from decoded JSON into frozen values with the fields that mgpu needs.

All processes use this module. `read_pod` and `read_node` must be fast, since they run for many events of a watch. They
read what users and nodes write, so they check the types of the values. `mgpu.dialects` reads the GPU request of a pod.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from mgpu.model.compute_resources import NO_CPU_MEMORY, UNBOUNDED, CpuMemory
from mgpu.model.errors import Problem, Rule
from mgpu.model.field_reader import FieldReader
from mgpu.model.quantities import QuantityError, same_quantity, whole_number
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import SEAL

_NODE_ANNOTATIONS = ("mgpu.io/", "dynamicgpuslice")
"""The prefixes of the annotations of a Node that mgpu stores. Other annotations may take 256 KiB on each node."""
GATED = "the pod has scheduling gates (spec.schedulingGates), so it cannot be bound yet"
MAX_GATES = 8
"""The most scheduling gates of a pod whose names are read. The API server accepts tens of thousands of them."""
_MAX_GATE_NAME = 317
"""The most characters of the name of a scheduling gate, a qualified name such as `kueue.x-k8s.io/admission`."""
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
"""The annotation in which Volcano names the PodGroup of a pod."""
SUGGESTED_NODE = "mgpu.io/suggested-node"
"""The annotation with the node that mgpu suggests to Volcano for a pod. mgpu writes it together with the same name in
`status.nominatedNodeName` (scheduler/decisions/suggestions.py)."""


class Stage(StrEnum):
    """When a container runs: init containers run one after another, then the app containers run together."""

    INIT = "init"
    SIDECAR = "sidecar"  # an init container with restartPolicy Always, which keeps running beside the app containers
    APP = "app"


class RequestedAmount(NamedTuple):
    """The amount of one resource that a container requests, as it is written in the pod, and the path of the field."""

    text: str
    path: str

    def positive(
        self,
        problems: list[Problem],
        *,
        most: int,
        limit: str = "any node has",
        read: Callable[[object], int] = whole_number,
    ) -> int | None:
        """Return the amount as a number. If it is not from 1 to `most`, append a problem and return None.

        Args:
            limit: the meaning of `most`, which completes the message "… is more than …".
            read: the parser of the quantity; it raises QuantityError.
        """
        try:
            number = read(self.text)
        except QuantityError as error:
            problems.append(Problem(self.path, str(error), Rule.QUANTITY))
            return None
        if number <= 0:
            problems.append(Problem(self.path, f"must be greater than 0, not {self.text}", Rule.QUANTITY))
            return None
        if number > most:
            problems.append(Problem(self.path, f"{self.text} is more than {limit}", Rule.TOO_MUCH))
            return None
        return number


def is_none(resource: str, amount: str) -> bool:
    """Return whether an amount requests nothing, which is so for 0 of a resource `nvidia.com/…`.

    LimitRanges and Helm charts set such amounts for pods without GPUs. For the vocabularies' own resources, admission
    denies an amount of 0 (docs/design/mgpu.md, "Validation").
    """
    return resource.startswith("nvidia.com/") and same_quantity(amount, "0")


@dataclass(frozen=True, slots=True)
class Container:
    """A container, an init container or a sidecar of a pod.

    Attributes:
        path: the path of the container in the pod, for messages: `spec.containers[0]`.
        position: the index of the container in `spec.initContainers` or `spec.containers`.
        visible: the indexes of `NVIDIA_VISIBLE_DEVICES` in `env`. Other variables are not stored, since there may be
            many.
    """

    name: str
    stage: Stage = Stage.APP
    path: str = "spec.containers[0]"
    position: int = 0
    requests: Mapping[str, str] = field(default_factory=dict, hash=False)
    limits: Mapping[str, str] = field(default_factory=dict, hash=False)
    visible: tuple[int, ...] = ()

    def requested(self, resource: str) -> RequestedAmount | None:
        """Return the amount in the requests, or else in the limits; None if there is none or it requests nothing."""
        for kind, amounts in (("requests", self.requests), ("limits", self.limits)):
            if resource in amounts:
                amount = amounts[resource]
                path = f"{self.path}.resources.{kind}[{resource}]"
                return None if is_none(resource, amount) else RequestedAmount(amount, path)
        return None


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of a Pod that mgpu needs.

    Attributes:
        containers: the containers in start order: first init containers and sidecars, then app containers.
        node: `spec.nodeName`; "" before the pod is bound.
        nominated_node: `status.nominatedNodeName`; "" if there is none, for a gated pod, and if mgpu only suggests the
            node. Cards are kept free for a nominated pod without a time limit, so these pods must not have any.
        ran: the names of the containers that have ever run.
        cpu_memory: the cpu and memory that the pod reserves on its node.
        gates: the names of the pod's scheduling gates, at most `MAX_GATES` of them.
        scheduling_group: `spec.schedulingGroup.podGroupName`, the name of its PodGroup; "" if there is none.
        volcano_group: the name of its PodGroup of Volcano; "" if there is none.
    """

    namespace: str
    name: str
    uid: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    containers: tuple[Container, ...] = ()
    node: str = ""
    nominated_node: str = ""
    phase: str = "Pending"
    deleting: bool = False
    ran: frozenset[str] = frozenset()
    created: str = ""
    scheduler: str = ""
    priority: int = 0
    start_time: str = ""
    cpu_memory: CpuMemory = NO_CPU_MEMORY
    gates: tuple[str, ...] = ()
    scheduling_group: str = ""
    volcano_group: str = ""

    @property
    def gated(self) -> bool:
        """Whether the pod has scheduling gates and no node.

        A gated pod cannot be bound, so cards that were reserved for it would be held without a time limit.
        """
        return bool(self.gates) and not self.node

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def ended(self) -> bool:
        """Whether the pod's phase is final, so that it holds nothing. A terminating pod still holds its cards."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def started(self) -> bool:
        """Whether any container has ever run."""
        return self.phase == "Running" or bool(self.ran)

    def has_run(self, containers: Iterable[str]) -> bool:
        """Return whether any of these containers has ever run. In phase Running, every container counts as run."""
        return self.phase == "Running" or not self.ran.isdisjoint(containers)

    @property
    def app_containers(self) -> tuple[Container, ...]:
        return tuple(c for c in self.containers if c.stage is Stage.APP)

    def resources(self) -> Iterator[tuple[Container, str]]:
        """Yield every container with each resource name in its requests or limits."""
        for container in self.containers:
            yield from ((container, name) for name in {**container.requests, **container.limits})


@dataclass(frozen=True, slots=True)
class Node:
    """The fields of a Node that mgpu needs.

    Attributes:
        annotations: the annotations that mgpu reads; others are left out.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    capacity: Mapping[str, str] = field(default_factory=dict, hash=False)
    allocatable: CpuMemory = UNBOUNDED


def read_new_pod(raw: object) -> Pod:
    """Return the pod in a user's CREATE request, ignoring its `status`. Raises BadObject as `read_pod` does.

    The API server resets the status of a new pod only after mutating admission. Until then the user chooses the status,
    and could name a ResourceClaim in it that hides the pod's request.
    """
    return read_pod({k: v for k, v in raw.items() if k != "status"} if isinstance(raw, dict) else raw)


def read_pod(raw: object) -> Pod:
    """Return the pod in `raw` (decoded JSON).

    Raises BadObject if a value has the wrong type, or if two containers have the same name.
    """
    reader = FieldReader()
    top = reader.table(raw, "pod")
    meta, spec, status = (reader.table(top.get(k), k) for k in ("metadata", "spec", "status"))
    node = sys.intern(reader.text(spec.get("nodeName"), "spec.nodeName"))  # A node's pods share its name.
    # A ResourceClaim in the status means that a DRA driver serves the request instead of a device plugin. Such a claim
    # is ignored once the pod has a sealed record. kube-scheduler creates claims before it binds a pod, so a later claim
    # is not genuine: an attacker with a scheduler's token could free the cards of a running pod by writing one.
    sealed = bool(node) and SEAL in table_at(meta, "annotations")
    claimed = frozenset(() if sealed else _claimed(status))
    gates = gate_names(reader.rows(spec.get("schedulingGates"), "spec.schedulingGates"))
    annotations = reader.texts(meta.get("annotations"), "metadata.annotations")
    nominated = reader.text(status.get("nominatedNodeName"), "status.nominatedNodeName")
    keeps_no_cards = (gates and not node) or nominated == annotations.get(SUGGESTED_NODE)
    containers = (
        *_containers(reader, spec.get("initContainers"), "spec.initContainers", claimed, init=True),
        *_containers(reader, spec.get("containers"), "spec.containers", claimed, init=False),
    )
    pod = Pod(
        namespace=sys.intern(reader.text(meta.get("namespace"), "metadata.namespace") or "default"),
        name=reader.text(meta.get("name") or meta.get("generateName"), "metadata.name"),
        uid=reader.text(meta.get("uid"), "metadata.uid"),
        annotations=annotations,
        labels=reader.texts(meta.get("labels"), "metadata.labels"),
        containers=containers,
        node=node,
        nominated_node="" if keeps_no_cards else nominated,
        phase=reader.text(status.get("phase"), "status.phase") or "Pending",
        deleting=bool(meta.get("deletionTimestamp")),
        ran=frozenset(containers_that_ran(status)) & {container.name for container in containers},
        created=reader.text(meta.get("creationTimestamp"), "metadata.creationTimestamp"),
        scheduler=reader.text(spec.get("schedulerName"), "spec.schedulerName"),
        priority=reader.integer(spec.get("priority"), "spec.priority"),
        start_time=reader.text(status.get("startTime"), "status.startTime"),
        cpu_memory=reader.cpu_memory(top, spec),
        gates=gates,
        scheduling_group=_scheduling_group(reader, spec),
        volcano_group=str(table_at(meta, "annotations").get(VOLCANO_GROUP) or ""),
    )
    reader.require_unique_names((container.name, container.path) for container in containers)
    reader.finish()
    return pod


def gate_names(rows: Iterable[object]) -> tuple[str, ...]:
    """Return the names of the first scheduling gates in the list `spec.schedulingGates`."""
    return tuple(str(table_at(row).get("name") or "")[:_MAX_GATE_NAME] for row in islice(rows, MAX_GATES))


def _scheduling_group(reader: FieldReader, spec: Mapping[str, Any]) -> str:
    group = spec.get("schedulingGroup")
    if not group:
        return ""
    name = reader.table(group, "spec.schedulingGroup").get("podGroupName")
    return reader.text(name, "spec.schedulingGroup.podGroupName")


def read_node(raw: object) -> Node:
    """Return the node in `raw` (decoded JSON).

    Raises:
        BadObject: if a value has the wrong type, or if labels, annotations or capacity are too large. A node's kubelet
            and agent write these, and the scheduler stores them for all nodes.
    """
    reader = FieldReader()
    top = reader.table(raw, "node")
    meta, status = reader.table(top.get("metadata"), "metadata"), reader.table(top.get("status"), "status")
    node = Node(
        name=reader.text(meta.get("name"), "metadata.name"),
        labels=reader.texts(meta.get("labels"), "metadata.labels"),
        annotations=_known_annotations(reader.texts(meta.get("annotations"), "metadata.annotations")),
        capacity=reader.amounts(status.get("capacity"), "status.capacity"),
        allocatable=reader.allocatable(top, status),
    )
    for path, table in (
        ("metadata.labels", node.labels),
        ("metadata.annotations", node.annotations),
        ("status.capacity", node.capacity),
    ):
        reader.limit(table, path)
    reader.finish()
    return node


def _known_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in annotations.items() if key.startswith(_NODE_ANNOTATIONS)}


def _containers(
    reader: FieldReader, raw: object, path: str, claimed: Collection[tuple[str, str]], *, init: bool
) -> Iterable[Container]:
    for i, item in enumerate(reader.rows(raw, path)):
        if reader.is_full:
            return  # The pod is invalid already, and a body of 1 MiB may have 150,000 entries of the wrong type.
        here = _indexed(path, i)
        entry = reader.table(item, here)
        stage = Stage.APP
        if init:
            stage = Stage.SIDECAR if entry.get("restartPolicy") == "Always" else Stage.INIT
        resources = reader.table(entry.get("resources"), f"{here}.resources")
        env = reader.rows(entry.get("env"), f"{here}.env")
        env = [e if isinstance(e, dict) else reader.table(e, f"{here}.env[{j}]") for j, e in enumerate(env)]
        name = reader.text(entry.get("name"), f"{here}.name")
        amounts = (reader.amounts(resources.get(kind), f"{here}.resources.{kind}") for kind in ("requests", "limits"))
        requests, limits = ({k: v for k, v in table.items() if (name, k) not in claimed} for table in amounts)
        yield Container(
            name=name,
            stage=stage,
            path=here,
            position=i,
            requests=requests,
            limits=limits,
            visible=tuple(j for j, e in enumerate(env) if e.get("name") == VISIBLE_DEVICES),
        )


@lru_cache(maxsize=1024)
def _indexed(path: str, position: int) -> str:
    """Return the path of a container. It is cached, so that the pods of a cluster share the strings."""
    return f"{path}[{position}]"


def _claimed(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each (container, resource) that a DRA driver serves through a ResourceClaim (KEP-5004)."""
    rows = table_at(status, "extendedResourceClaimStatus").get("requestMappings")
    for row in rows if isinstance(rows, list) else ():
        found = table_at(row)
        yield str(found.get("containerName", "")), str(found.get("resourceName", ""))


def containers_that_ran(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the containers that have ever run according to the status of their pod."""
    for key in ("initContainerStatuses", "containerStatuses"):
        rows = status.get(key)
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and _has_run(row):
                yield str(row.get("name", ""))


def _has_run(status: Mapping[str, Any]) -> bool:
    if status.get("containerID"):
        return True
    states = [state for key in ("state", "lastState") if isinstance(state := status.get(key), dict)]
    return any(state.keys() - {"waiting"} for state in states)
