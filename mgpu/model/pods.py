"""Pods and nodes, read once from decoded JSON into what mgpu needs of them.

Every process reads the objects of its watches and reviews through `read_pod` and `read_node`, so this is a hot path,
and the first code that sees what users write. It checks types and bounds sizes; what a pod requests is for
`mgpu.dialects`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from mgpu.model.compute_resources import (
    NO_CPU_MEMORY,
    UNBOUNDED,
    CpuMemory,
    allocatable_cpu_memory,
    requested_cpu_memory,
)
from mgpu.model.errors import BadObject, Problem, Rule
from mgpu.model.quantities import QuantityError, same_quantity, whole_number
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import SEAL

_NODE_ANNOTATIONS = ("mgpu.io/", "dynamicgpuslice")
"""Prefixes of the annotations of a Node that mgpu reads. The others may take 256 KiB of each node."""
_MOST_TEXT = 1 << 18
"""Characters of a Node's labels, annotations and capacity each: the API server's own limit for annotations."""
_MOST_ENTRIES = 1024
"""Entries of a Node's labels, annotations and capacity each. 50,000 short labels fit into 256 KiB, and take 6 MiB once
decoded."""
GATED = "the pod has scheduling gates (spec.schedulingGates), so it cannot be bound yet"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"


class Stage(StrEnum):
    """When a container runs: init containers one by one, then the app containers together (core/v1 Pod)."""

    INIT = "init"
    SIDECAR = "sidecar"  # an init container with restartPolicy Always, which keeps running beside the app containers
    APP = "app"


class RequestedAmount(NamedTuple):
    """A container's amount of one resource as the pod states it, and the path of the field."""

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
        """Return the amount, or None and a problem in `problems` where it is no number from 1 to `most`.

        Args:
            limit: what `most` is, for the message.
            read: reads the quantity; raises QuantityError.
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
    """Return whether an amount requests nothing: 0 of an NVIDIA resource.

    LimitRanges and charts write such amounts for pods without GPUs, and the kubelet gives such a container none. For
    the vocabularies' own resources 0 is denied (docs/design/mgpu.md, "Validation").
    """
    return resource.startswith("nvidia.com/") and same_quantity(amount, "0")


@dataclass(frozen=True, slots=True)
class Container:
    """A container of any stage.

    Attributes:
        path: where it is in the pod, for messages: `spec.containers[0]`.
        position: its index in the list of its stage.
        visible: the positions of `NVIDIA_VISIBLE_DEVICES` in its `env`. Other variables are not kept, since there may
            be many.
    """

    name: str
    stage: Stage = Stage.APP
    path: str = "spec.containers[0]"
    position: int = 0
    requests: Mapping[str, str] = field(default_factory=dict, hash=False)
    limits: Mapping[str, str] = field(default_factory=dict, hash=False)
    visible: tuple[int, ...] = ()

    def requested(self, resource: str) -> RequestedAmount | None:
        """Return the amount from requests, else from limits; None where both lack it or where it `is_none`."""
        for kind, amounts in (("requests", self.requests), ("limits", self.limits)):
            if resource in amounts:
                amount = amounts[resource]
                path = f"{self.path}.resources.{kind}[{resource}]"
                return None if is_none(resource, amount) else RequestedAmount(amount, path)
        return None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as mgpu needs it.

    Attributes:
        containers: in the order in which they start: init containers and sidecars, then app containers.
        cpu_memory: the cpu and memory of its node that it reserves.
        ran: the names of its containers that have ever run.
        gated: whether it has scheduling gates, so that it cannot be bound. Cards reserved for it would be held without
            a limit in time.
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
    gated: bool = False

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def ended(self) -> bool:
        """Whether the pod has ended and holds nothing; a terminating pod holds (docs/design/design.md, "The model")."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def started(self) -> bool:
        """Whether any container has ever run."""
        return self.phase == "Running" or bool(self.ran)

    def has_run(self, containers: Iterable[str]) -> bool:
        """Return whether any of these containers has ever run. In phase Running all have."""
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
    """A node as mgpu needs it.

    Attributes:
        annotations: those that mgpu reads.
        allocatable: its allocatable cpu and memory.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    capacity: Mapping[str, str] = field(default_factory=dict, hash=False)
    allocatable: CpuMemory = UNBOUNDED


def read_new_pod(raw: object) -> Pod:
    """Return the pod in a user's CREATE request, without its `status`. Raises BadObject as `read_pod` does.

    The API server resets the status of a new pod only after mutating admission. At admission the status is what the
    user wrote, such as a ResourceClaim that would take the pod's request away.
    """
    return read_pod({k: v for k, v in raw.items() if k != "status"} if isinstance(raw, dict) else raw)


def read_pod(raw: object) -> Pod:
    """Return the pod in `raw` (decoded JSON). Raises BadObject with the path of every part of a wrong type."""
    reader = _Reader()
    top = reader.table(raw, "pod")
    meta, spec, status = (reader.table(top.get(k), k) for k in ("metadata", "spec", "status"))
    node = reader.text(spec.get("nodeName"), "spec.nodeName")
    # A ResourceClaim in the status means that a DRA driver serves the request instead of a device plugin. It counts
    # only while the pod has no sealed record: claims are made before a pod is bound, and otherwise a stolen scheduler
    # token could free the cards of a running pod by writing a claim into its status.
    sealed = bool(node) and SEAL in table_at(meta, "annotations")
    claimed = frozenset(() if sealed else _claimed(status))
    gated = bool(reader.rows(spec.get("schedulingGates"), "spec.schedulingGates")) and not node
    nominated = reader.text(status.get("nominatedNodeName"), "status.nominatedNodeName")
    containers = (
        *_containers(reader, spec.get("initContainers"), "spec.initContainers", claimed, init=True),
        *_containers(reader, spec.get("containers"), "spec.containers", claimed, init=False),
    )
    pod = Pod(
        namespace=reader.text(meta.get("namespace"), "metadata.namespace") or "default",
        name=reader.text(meta.get("name") or meta.get("generateName"), "metadata.name"),
        uid=reader.text(meta.get("uid"), "metadata.uid"),
        annotations=reader.texts(meta.get("annotations"), "metadata.annotations"),
        labels=reader.texts(meta.get("labels"), "metadata.labels"),
        containers=containers,
        node=node,
        nominated_node="" if gated else nominated,  # a nomination reserves cards
        phase=reader.text(status.get("phase"), "status.phase") or "Pending",
        deleting=bool(meta.get("deletionTimestamp")),
        ran=frozenset(containers_that_ran(status)) & {container.name for container in containers},
        created=reader.text(meta.get("creationTimestamp"), "metadata.creationTimestamp"),
        scheduler=reader.text(spec.get("schedulerName"), "spec.schedulerName"),
        priority=reader.integer(spec.get("priority"), "spec.priority"),
        start_time=reader.text(status.get("startTime"), "status.startTime"),
        cpu_memory=reader.cpu_memory(top, spec),
        gated=gated,
    )
    reader.unique_names(containers)
    reader.finish()
    return pod


def read_node(raw: object) -> Node:
    """Return the node in `raw` (decoded JSON).

    Raises:
        BadObject: with the path of every part of a wrong type, and where labels, annotations or capacity exceed
            `_MOST_TEXT` or `_MOST_ENTRIES`. A node's kubelet and agent write them, and processes keep those of all
            nodes.
    """
    reader = _Reader()
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
    reader: "_Reader", raw: object, path: str, claimed: Collection[tuple[str, str]], *, init: bool
) -> Iterable[Container]:
    for i, item in enumerate(reader.rows(raw, path)):
        if reader.is_full:
            return  # The pod is refused already, and a body of 1 MiB may have 150,000 entries of a wrong type.
        here = _place(path, i)
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
def _place(path: str, position: int) -> str:
    """Return one text for all pods: a scheduler keeps the containers of tens of thousands of pods."""
    return f"{path}[{position}]"


def _claimed(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (container, resource) for which kube-scheduler made a ResourceClaim: a DRA driver serves it (KEP-5004)."""
    rows = table_at(status, "extendedResourceClaimStatus").get("requestMappings")
    for row in rows if isinstance(rows, list) else ():
        found = table_at(row)
        yield str(found.get("containerName", "")), str(found.get("resourceName", ""))


def containers_that_ran(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the containers that have ever run, as the status of their pod says."""
    lists = [status.get(key) for key in ("initContainerStatuses", "containerStatuses")]
    for row in (row for rows in lists if isinstance(rows, list) for row in rows if isinstance(row, dict)):
        states = [state for key in ("state", "lastState") if isinstance(state := row.get(key), dict)]
        if row.get("containerID") or any(state.keys() - {"waiting"} for state in states):
            yield str(row.get("name", ""))


_PROBLEMS = 1000
"""Problems that are kept of one object. A list of 100,000 numbers in place of objects must not become as many texts."""


class _Reader:
    """Reads values of decoded JSON and collects the parts of a wrong type instead of stopping at the first."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def finish(self) -> None:
        """Raise BadObject with what was found, if anything."""
        if self._problems:
            raise BadObject(self._problems)

    @property
    def is_full(self) -> bool:
        """Whether no further problem is kept."""
        return len(self._problems) >= _PROBLEMS

    def _wrong(self, path: str, expected: str, value: object) -> None:
        self._add(path, f"must be {expected}, not {type(value).__name__}", Rule.FIELD_TYPE)

    def _add(self, path: str, message: str, rule: Rule = Rule.OTHER) -> None:
        if not self.is_full:
            self._problems.append(Problem(path, message, rule))

    def limit(self, table: Mapping[str, str], path: str) -> None:
        """Add a problem where a table of a Node is larger than mgpu keeps."""
        size = sum(len(key) + len(text) for key, text in table.items())
        if size > _MOST_TEXT:
            self._add(path, f"has {size} characters, more than the {_MOST_TEXT} that mgpu keeps")
        if len(table) > _MOST_ENTRIES:
            self._add(path, f"has {len(table)} entries, more than the {_MOST_ENTRIES} that mgpu keeps")

    def unique_names(self, containers: Iterable[Container]) -> None:
        """Add a problem for containers of the same name.

        Records name containers by name. The API server refuses such pods too, but only after mutating admission.
        """
        seen: dict[str, str] = {}
        for container in containers:
            if container.name and container.name in seen:
                text = f"{container.name!r} is the name of {seen[container.name]} already"
                self._add(f"{container.path}.name", text, Rule.CONTAINER_NAME)
            seen.setdefault(container.name, container.path)

    def cpu_memory(self, pod: Mapping[str, Any], spec: Mapping[str, Any]) -> CpuMemory:
        """Return the cpu and memory that the pod reserves. Called after its containers have been read.

        An amount that is no quantity counts as nothing here; the API server refuses it after admission.
        """
        self.amounts(spec.get("overhead"), "spec.overhead")
        of_pod = self.table(spec.get("resources"), "spec.resources")
        for kind in ("requests", "limits"):
            self.amounts(of_pod.get(kind), f"spec.resources.{kind}")
        try:
            return NO_CPU_MEMORY if self._problems else requested_cpu_memory(pod)
        except QuantityError:
            return NO_CPU_MEMORY

    def allocatable(self, node: Mapping[str, Any], status: Mapping[str, Any]) -> CpuMemory:
        """Return the allocatable cpu and memory of a node; unbounded where they cannot be read."""
        self.amounts(status.get("allocatable"), "status.allocatable")
        try:
            return UNBOUNDED if self._problems else allocatable_cpu_memory(node)
        except QuantityError:
            return UNBOUNDED

    def table(self, value: object, path: str) -> Mapping[str, Any]:
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self._wrong(path, "an object", value)
        return {}

    def rows(self, value: object, path: str) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, list):
            return value
        self._wrong(path, "a list", value)
        return []

    def text(self, value: object, path: str) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        self._wrong(path, "a string", value)
        return ""

    def integer(self, value: object, path: str) -> int:
        if value is None:
            return 0
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._wrong(path, "an integer", value)
        return 0

    def texts(self, value: object, path: str) -> Mapping[str, str]:
        table = self.table(value, path)
        if all(type(text) is str for text in table.values()):
            return dict(table)  # A pod may have 100,000 labels, so no path is built for each.
        return {k: self.text(v, f"{path}[{k}]") for k, v in table.items()}

    def amounts(self, value: object, path: str) -> Mapping[str, str]:
        """Return quantities as text. The API accepts bare numbers too and stores them as text."""
        table = self.table(value, path)
        for name, amount in table.items():
            if isinstance(amount, bool) or not isinstance(amount, str | int | float):
                self._wrong(f"{path}[{name}]", "a quantity", amount)
        return {k: str(v) for k, v in table.items()}
