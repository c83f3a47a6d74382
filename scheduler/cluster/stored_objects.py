"""Reduces MtgpuPods, and the Pods created for them, to the parts that the scheduler stores. The functions are pure.

Users choose the size of these objects, and there may be thousands, so only the fields that the controller reads are
stored. They are stored as JSON text, which takes a tenth of the memory of the decoded object. The size of every part
must be limited: admission limits the size of an object too, but not at every update, for example not when only its
labels change. All other fields of an MtgpuPod are read from the API server when its Pod is created. Mainly
`mtgpupod_objects` calls these functions.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import orjson

from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import vocabulary_of
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS as CONSTRAINTS
from mgpu.model.pods import VISIBLE_DEVICES
from mgpu.model.raw_objects import table_at

Raw = Mapping[str, Any]
K = TypeVar("K")

_META_FIELDS = frozenset(
    (*("namespace", "name", "uid", "resourceVersion", "generation"), *("creationTimestamp", "deletionTimestamp"))
)
_OWN_POD_META_FIELDS = _META_FIELDS | {"deletionGracePeriodSeconds", "generateName"}
_STATUS_FIELDS = frozenset(("phase", "BoundDeviceID", "observedGeneration"))
_TOLERATION_FIELDS = ("key", "operator", "value", "effect")
_CONTAINER_FIELDS = frozenset(("name", "restartPolicy"))
_ANNOTATIONS = frozenset((*mtgpu.ANNOTATIONS, *CONSTRAINTS))
_CONTAINER_LISTS = ("initContainers", "containers")
_MAX_MIRRORED = 16 << 10
"""The most bytes of JSON that are stored of a Pod's metadata, and of its status. The status of an MtgpuPod repeats
both. If one of them is larger, its largest fields are left out or shortened. mgpu's annotations are never left out."""
_MAX_STATUS = 3 * _MAX_MIRRORED
"""The most bytes of the status of an MtgpuPod, which consists of the metadata and the status of its Pod and of
conditions."""
_MAX_SPEC = 32 << 10
"""The most bytes of the stored part of an MtgpuPod's spec. 256 containers with names of 63 characters take 27 KiB."""
FINALIZERS = 16
"""The most finalizers of an MtgpuPod that are stored, besides mgpu's own."""
_MAX_TEXT = 320
"""The most characters of a stored text. A qualified name has at most 317, so a name that is too long for Kubernetes is
still too long after it is cut."""
_MAX_CONDITIONS = 16
"""The most conditions that are stored of an occupy pod, and of a status that is too large."""
EXCESS = "excess"
"""The field of a stored MtgpuPod that says which part of the MtgpuPod is too large to be read."""


class StoredObjects(Mapping[K, Raw]):
    """Objects as JSON text. Each object is decoded when it is read, so that not all are decoded at once."""

    def __init__(self, texts: Mapping[K, bytes]) -> None:
        self._texts = texts

    def __getitem__(self, key: K) -> Raw:
        return decode(self._texts[key])

    def __iter__(self) -> Iterator[K]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, key: object) -> bool:
        return key in self._texts

    def text(self, key: K) -> bytes:
        """Return an object as JSON text."""
        return self._texts[key]


def encode(raw: object) -> bytes:
    return orjson.dumps(raw)


def decode(text: bytes) -> dict[str, Any]:
    raw: dict[str, Any] = orjson.loads(text)
    return raw


def stored_mtgpupod(raw: Raw) -> dict[str, Any]:
    """Return the stored part of an MtgpuPod, which `read_mtgpupod` reads like the whole object.

    If the spec is too large, only its `nodeName` is stored, and the field EXCESS is added. Fields that do not affect
    which card the pod gets, such as `spec.priority`, are left out; admission and the API server validate them.
    """
    meta = raw["metadata"]
    spec = raw.get("spec")
    stored: dict[str, Any] = {"metadata": _only(meta, _META_FIELDS), "status": _status(raw.get("status") or {})}
    if meta.get("finalizers"):
        stored["metadata"]["finalizers"] = _finalizers(meta["finalizers"])
    if "annotations" in meta:
        stored["metadata"]["annotations"] = _annotations(meta["annotations"])
    if isinstance(spec, dict):
        stored["spec"] = {key: reduce(spec[key]) for key, reduce in _SPEC_FIELDS.items() if key in spec}
        size = len(encode(stored["spec"]))
        if size > _MAX_SPEC:
            stored["spec"] = _only(spec, frozenset(("nodeName",)))
            part = "the part that mgpu reads (containers and tolerations)"
            stored[EXCESS] = f"spec: {part} has {size} bytes, but may have at most {_MAX_SPEC}"
    return stored


def stored_own_pod(raw: Raw) -> dict[str, Any]:
    """Return the stored part of a Pod that was created for an MtgpuPod.

    It consists of the variables that name its card, and of the metadata and the status, which the status of the
    MtgpuPod mirrors.
    """
    meta = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    if len(encode(meta.get("annotations"))) > _MAX_MIRRORED:
        meta["annotations"] = _mgpu_annotations(meta["annotations"])
    owners = [row for row in meta.get("ownerReferences") or () if row.get("controller")]
    reduced_meta = {
        "annotations": _mgpu_annotations(meta.get("annotations") or {}),
        "ownerReferences": [row for row in owners if len(encode(row)) <= _MAX_TEXT * 4],
    }
    status = raw.get("status") or {}
    containers = table_at(raw, "spec").get("containers") or ()
    return {
        "metadata": _within(_MAX_MIRRORED, meta, _OWN_POD_META_FIELDS, reduced_meta),
        "spec": {"containers": [{"env": _visible_devices(container.get("env"))} for container in containers]},
        "status": _within(_MAX_MIRRORED, status, frozenset(("phase",)), {"conditions": _conditions(status)}),
    }


def stored_occupy_pod(raw: Raw) -> dict[str, Any]:
    """Return the stored part of an occupy pod, which keeps other pods off the card of MtgpuPods (docs/mtgpu.md)."""
    meta = raw["metadata"]
    status = raw.get("status") or {}
    labels = _only(meta.get("labels") or {}, frozenset((mtgpu.OCCUPY_LABEL,)))
    stored_status = {
        "phase": status.get("phase"),
        "message": _cut(status.get("message")),
        "conditions": _conditions(status),
    }
    return {
        "metadata": {**_only(meta, _META_FIELDS), "labels": labels},
        "spec": _only(raw.get("spec") or {}, frozenset(("nodeName",))),
        "status": {key: value for key, value in stored_status.items() if value},
    }


def _within(max_bytes: int, table: Raw, required: frozenset[str], reduced: Raw) -> dict[str, Any]:
    """Return the table. If it is larger than `max_bytes` bytes, its largest fields are left out until the rest fits.

    Args:
        required: The fields that are never left out.
        reduced: By field, the value that replaces the field if it is left out.
    """
    sizes = {key: len(encode({key: value})) for key, value in table.items()}
    size = sum(sizes.values())
    dropped = set()
    for key in sorted(sizes.keys() - required, key=lambda key: sizes[key], reverse=True):
        if size <= max_bytes:
            break
        dropped.add(key)
        size -= sizes[key]
    kept = {key: reduced.get(key) if key in dropped else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if key not in dropped or value}


def _status(status: Raw) -> Raw:
    """Return the status of an MtgpuPod. A status that is too large is reduced, and the controller writes it again."""
    if len(encode(status)) <= _MAX_STATUS:
        return status
    uid = table_at(status, "PodObjectMeta").get("uid")
    reduced = {**_only(status, _STATUS_FIELDS), "conditions": _conditions(status)}
    return {**reduced, "PodObjectMeta": {"uid": uid}} if isinstance(uid, str) else reduced


def _conditions(status: Raw) -> list[dict[str, Any]]:
    """Return at most _MAX_CONDITIONS conditions with shortened texts.

    The condition `DisruptionTarget`, which an eviction sets, comes first, so that it is never left out.
    """
    rows = [row for row in status.get("conditions") or () if isinstance(row, dict)]
    first = sorted(rows, key=lambda row: row.get("type") != "DisruptionTarget")[:_MAX_CONDITIONS]
    return [
        {key[:_MAX_TEXT]: _cut(value) for key, value in row.items() if isinstance(value, str | int)} for row in first
    ]


def _cut(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _mgpu_annotations(annotations: Raw) -> dict[str, Any]:
    return {key: _cut(text) for key, text in annotations.items() if key in mtgpu.ANNOTATIONS}


def _finalizers(names: list[str]) -> list[str]:
    """Return at most FINALIZERS + 1 of the finalizers. If it finds that many, the controller reads all from the API."""
    if len(names) <= FINALIZERS:
        return names
    others = [name for name in names if name != mtgpu.FINALIZER][:FINALIZERS]
    return [*others, mtgpu.FINALIZER if mtgpu.FINALIZER in names else names[-1]]


def _tolerations(rows: object) -> object:
    """Return the tolerations that may match a `NoExecute` taint, with the fields that are read.

    A toleration with a field of a wrong type tolerates nothing, because the API server refuses a Pod with it.
    """
    if not isinstance(rows, list):
        return None
    tables = [
        {key: row.get(key) for key in _TOLERATION_FIELDS if row.get(key)} for row in rows if isinstance(row, dict)
    ]
    valid = [
        row
        for row in tables
        if all(isinstance(text, str) for text in row.values()) and row.get("effect") in (None, "NoExecute")
    ]
    texts = {encode({key: _cut(text) for key, text in row.items()}) for row in valid}
    return [decode(text) for text in sorted(texts)]


def _only(table: Raw, keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key in keys}


def _annotations(annotations: object) -> object:
    """Return the annotations that the controller reads, and those of a wrong type, which are reported as problems."""
    if not isinstance(annotations, dict):
        return annotations
    return {key: _cut(text) for key, text in annotations.items() if key in _ANNOTATIONS or not isinstance(text, str)}


def _containers(rows: object) -> object:
    """Return the containers with the fields that the controller reads. A malformed list is not changed."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return rows
    return [_container(row) for row in rows]


def _container(row: Raw) -> dict[str, Any]:
    stored = _only(row, _CONTAINER_FIELDS)
    if "env" in row:
        stored["env"] = _visible_devices(row["env"])
    if "resources" in row:
        stored["resources"] = _resources(row["resources"])
    return stored


def _visible_devices(env: object) -> object:
    """Return the variables that say which cards a container sees. A malformed list is not changed."""
    if not isinstance(env, list) or not all(isinstance(row, dict) for row in env):
        return env
    return [row for row in env if row.get("name") == VISIBLE_DEVICES]


def _resources(resources: object) -> object:
    if not isinstance(resources, dict):
        return resources
    return {kind: _amounts(resources[kind]) for kind in ("requests", "limits") if kind in resources}


def _amounts(amounts: object) -> object:
    if not isinstance(amounts, dict):
        return amounts
    return {name: amount for name, amount in amounts.items() if _is_read(name, amount)}


def _is_read(name: str, amount: object) -> bool:
    """Return whether the amount belongs to a vocabulary, or has a wrong type, which is reported as a problem."""
    is_valid = isinstance(amount, str | int | float) and not isinstance(amount, bool)
    return not is_valid or name == SHARE or vocabulary_of(name) is not None


_SPEC_FIELDS: Mapping[str, Callable[[object], object]] = {
    "nodeName": _cut,
    "tolerations": _tolerations,
    **dict.fromkeys(_CONTAINER_LISTS, _containers),
}
