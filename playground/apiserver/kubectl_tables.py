"""Computes the Tables of the API server: the rows and columns that `kubectl get` prints.

To give a built-in kind columns, add an entry to `_COLUMNS`. A custom resource has the columns that its
CustomResourceDefinition lists in `additionalPrinterColumns`. All other kinds have the columns Name and Age.
`api_server` calls `table`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from playground.apiserver.kinds import Kind
from playground.apiserver.storage import Item, Object

Statuses = list[dict[str, Any]]


def _statuses(pod: Object, field: str) -> Statuses:
    return (pod.get("status") or {}).get(field) or []


def ready_count(pod: Object) -> str:
    """Return the READY column of a pod, for example `1/2`."""
    ready = sum(1 for s in _statuses(pod, "containerStatuses") if s.get("ready"))
    return f"{ready}/{len(pod['spec']['containers'])}"


def restarts(pod: Object) -> str:
    """Return the RESTARTS column of a pod: the sum over its containers, without init containers."""
    return str(sum(s.get("restartCount") or 0 for s in _statuses(pod, "containerStatuses")))


def _reason_of(status: Object) -> str | None:
    """Return why a container does not run, or None if it runs or no reason is known."""
    state = status.get("state") or {}
    if reason := (state.get("waiting") or {}).get("reason"):
        return str(reason)
    if (ended := state.get("terminated")) is not None:
        if ended.get("reason"):
            return str(ended["reason"])
        signal = ended.get("signal")
        return f"Signal:{signal}" if signal else f"ExitCode:{ended.get('exitCode', 0)}"
    return None


def _initializing(pod: Object) -> str | None:
    """Return the STATUS of a pod whose init containers are not done, or None if they are done.

    A restartable init container is done when it has started.
    """
    specs = pod["spec"].get("initContainers") or []
    for i, status in enumerate(_statuses(pod, "initContainerStatuses")):
        state = status.get("state") or {}
        ended = state.get("terminated")
        if ended is not None and ended.get("exitCode") == 0:
            continue
        if i < len(specs) and specs[i].get("restartPolicy") == "Always" and status.get("started"):
            continue
        reason = _reason_of(status)
        if reason and reason != "PodInitializing":
            return f"Init:{reason}"
        return f"Init:{i}/{len(specs)}"
    return None


def summary(pod: Object) -> str:
    """Return the STATUS column of a pod, like printPod in kube-apiserver's pkg/printers, which knows more cases."""
    status = pod.get("status") or {}
    reason = status.get("reason") or status.get("phase") or "Unknown"
    if "SchedulingGated" in [c.get("reason") for c in status.get("conditions") or [] if c["type"] == "PodScheduled"]:
        reason = "SchedulingGated"
    if initializing := _initializing(pod):
        reason = initializing
    else:
        statuses = _statuses(pod, "containerStatuses")
        running = any(s.get("ready") and (s.get("state") or {}).get("running") is not None for s in statuses)
        for container in reversed(statuses):
            reason = _reason_of(container) or reason
        if reason == "Completed" and running:
            reason = "Running"
    if "deletionTimestamp" in pod["metadata"]:
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)


@dataclass(frozen=True)
class Column:
    """A column of a Table.

    Attributes:
        cell: A function that returns the value for an object.
        type: The OpenAPI type of the values.
        priority: 0 if kubectl always prints the column, 1 if only `kubectl get -o wide` prints it.
    """

    name: str
    cell: Callable[[Object], Any]
    type: str = "string"
    priority: int = 0


def age(timestamp: str | None) -> str:
    """Return the time since an RFC 3339 timestamp, for example `45s`, `3m10s`, `2h5m` or `4d`.

    This is the form in which kubectl prints ages, but ages of two days and more have only days.
    """
    if not timestamp:
        return "<unknown>"
    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d"


def _at(obj: Any, path: str, default: Any = None) -> Any:
    """Return the field at a path such as `status.podIP`, or `default` if it is missing or null."""
    for part in path.split("."):
        obj = obj.get(part) if isinstance(obj, dict) else None
    return default if obj is None else obj


def _field(path: str, default: Any = "<none>") -> Callable[[Object], Any]:
    return lambda obj: _at(obj, path, default)


_NAME = Column("Name", _field("metadata.name", ""))
_AGE = Column("Age", lambda o: age(o["metadata"].get("creationTimestamp")))


def _size(field: str) -> Callable[[Object], Any]:
    return lambda obj: len(obj.get(field) or ())


def _node_status(node: Object) -> str:
    ready = next((c["status"] for c in _at(node, "status.conditions", []) if c["type"] == "Ready"), None)
    text = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return text + (",SchedulingDisabled" if _at(node, "spec.unschedulable") else "")


def _node_roles(node: Object) -> str:
    prefix = "node-role.kubernetes.io/"
    roles = sorted(k.removeprefix(prefix) for k in _at(node, "metadata.labels", {}) if k.startswith(prefix))
    return ",".join(roles) or "<none>"


def _node_address(kind: str) -> Callable[[Object], Any]:
    return lambda n: next((a["address"] for a in _at(n, "status.addresses", []) if a["type"] == kind), "<none>")


def _last_seen(event: Object) -> str:
    return age(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp"))


def _event_object(event: Object) -> str:
    about = event["involvedObject"]
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _ports(service: Object) -> str:
    return ",".join(f"{p['port']}/{p.get('protocol', 'TCP')}" for p in _at(service, "spec.ports", [])) or "<none>"


def _claim_state(claim: Object) -> str:
    """Return the STATE column of a ResourceClaim, such as `allocated,reserved`."""
    deleted = "deletionTimestamp" in claim["metadata"]
    states = ["deleted"] if deleted else []
    if _at(claim, "status.allocation") is None:
        states += [] if deleted else ["pending"]
    else:
        states += ["allocated", *(["reserved"] if _at(claim, "status.reservedFor") else [])]
    return ",".join(states)


_CREATED = "metadata.creationTimestamp"
_WEBHOOKS = (_NAME, Column("Webhooks", _size("webhooks"), "integer"), _AGE)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "pods": (
        _NAME,
        Column("Ready", ready_count),
        Column("Status", summary),
        Column("Restarts", restarts),
        _AGE,
        Column("IP", _field("status.podIP"), priority=1),
        Column("Node", _field("spec.nodeName"), priority=1),
        Column("Nominated Node", _field("status.nominatedNodeName"), priority=1),
        Column("Readiness Gates", lambda _: "<none>", priority=1),
    ),
    "nodes": (
        _NAME,
        Column("Status", _node_status),
        Column("Roles", _node_roles),
        _AGE,
        Column("Version", _field("status.nodeInfo.kubeletVersion", "")),
        Column("Internal-IP", _node_address("InternalIP"), priority=1),
        Column("External-IP", _node_address("ExternalIP"), priority=1),
        Column("OS-Image", _field("status.nodeInfo.osImage", "<unknown>"), priority=1),
        Column("Kernel-Version", _field("status.nodeInfo.kernelVersion", "<unknown>"), priority=1),
        Column("Container-Runtime", _field("status.nodeInfo.containerRuntimeVersion", "<unknown>"), priority=1),
    ),
    "events": (
        Column("Last Seen", _last_seen),
        Column("Type", _field("type", "")),
        Column("Reason", _field("reason", "")),
        Column("Object", _event_object),
        Column("Subobject", _field("involvedObject.fieldPath", ""), priority=1),
        Column("Source", _field("source.component", ""), priority=1),
        Column("Message", lambda e: (e.get("message") or "").strip()),
        Column("First Seen", lambda e: age(e.get("firstTimestamp") or e.get("eventTime")), priority=1),
        Column("Count", _field("count", 1), "integer", priority=1),
        Column("Name", _field("metadata.name", ""), priority=1),
    ),
    "resourceclaims.resource.k8s.io": (_NAME, Column("State", _claim_state), _AGE),
    "resourceslices.resource.k8s.io": (
        _NAME,
        Column("Node", _field("spec.nodeName", "")),
        Column("Driver", _field("spec.driver", "")),
        Column("Pool", _field("spec.pool.name", "")),
        _AGE,
    ),
    "namespaces": (_NAME, Column("Status", _field("status.phase", "")), _AGE),
    "configmaps": (_NAME, Column("Data", _size("data"), "integer"), _AGE),
    "secrets": (_NAME, Column("Type", _field("type", "")), Column("Data", _size("data"), "integer"), _AGE),
    "services": (
        _NAME,
        Column("Type", _field("spec.type", "")),
        Column("Cluster-IP", _field("spec.clusterIP")),
        Column("External-IP", lambda _: "<none>"),
        Column("Port(s)", _ports),
        _AGE,
    ),
    "leases.coordination.k8s.io": (_NAME, Column("Holder", _field("spec.holderIdentity", "")), _AGE),
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": _WEBHOOKS,
    "validatingwebhookconfigurations.admissionregistration.k8s.io": _WEBHOOKS,
    "customresourcedefinitions.apiextensions.k8s.io": (_NAME, Column("Created At", _field(_CREATED))),
}

_STEP = re.compile(r"""\.?([\w\0/-]+)|\['([^']+)'\]|\[(\d+)\]|\[\?\(@\.([\w.]+)==["']([^"']*)["']\)\]""")


def json_path(obj: Any, path: str) -> Any:
    """Return the value at the jsonPath of a printer column, or None if there is no value.

    A path consists of fields (`\\.` is a dot in a name), indexes, and conditions such as `[?(@.type=="Ready")]`.
    """
    for name, quoted, index, key, value in _STEP.findall(path.replace("\\.", "\0")):
        name = (name or quoted).replace("\0", ".")
        if name:
            obj = obj.get(name) if isinstance(obj, dict) else None
        elif index:
            obj = obj[int(index)] if isinstance(obj, list) and len(obj) > int(index) else None
        else:
            obj = next((i for i in obj or [] if str(_at(i, key)) == value), None)
    return obj


def _custom_column(column: Any) -> Column:
    is_date = column["type"] == "date"
    return Column(
        column["name"],
        lambda o: age(json_path(o, column["jsonPath"])) if is_date else json_path(o, column["jsonPath"]),
        column["type"],
        column.get("priority", 0),
    )


def columns(kind: Kind) -> tuple[Column, ...]:
    if kind.columns:
        return (_NAME, *map(_custom_column, kind.columns))
    return _COLUMNS.get(kind.resource, (_NAME, _AGE))


def table(items: list[Item], kind: Kind, metadata: Object, include: str, *, header: bool = True) -> bytes:
    """Return a Table of meta.k8s.io/v1 with a row for each object, as JSON.

    Args:
        metadata: The metadata of the Table.
        include: The query parameter `includeObject`: "Object", "Metadata" or "None".
        header: Whether to include the definitions of the columns. A watch includes them only in its first event.
    """
    found = columns(kind)
    definitions = [
        {"name": c.name, "type": c.type, "format": "name" * (c is _NAME), "description": "", "priority": c.priority}
        for c in found
    ]
    rows: list[Object] = []
    for item in items:
        rows.append({"cells": [c.cell(item.obj) for c in found]})
        if include == "Object":
            rows[-1]["object"] = item.obj
        elif include != "None":
            partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
            rows[-1]["object"] = partial | {"metadata": item.obj["metadata"]}
    body: Object = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return orjson.dumps(body | {"columnDefinitions": definitions if header else [], "rows": rows})
