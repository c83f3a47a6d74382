"""What the scheduler keeps of MtgpuPods and of the Pods that are made for them. Pure.

Users choose how large these are, and there may be thousands. Of each, only the parts are kept that the controller
reads, as JSON text, which takes a tenth of the memory of the decoded object. Each part has a bound in bytes: admission
checks the size of an object too, but not on every update, such as one of the labels alone. What else an MtgpuPod has is
read from the API server when its Pod is created.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import orjson

from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import vocabulary_of
from mgpu.model.pod_constraints import ALL as WISHES
from mgpu.model.pods import VISIBLE_DEVICES
from mgpu.model.raw_objects import table_at

Raw = Mapping[str, Any]
K = TypeVar("K")

_NAMES = ("namespace", "name", "uid", "resourceVersion", "generation")
_OF_META = frozenset((*_NAMES, "creationTimestamp", "deletionTimestamp"))
_OF_MADE = frozenset((*_OF_META, "deletionGracePeriodSeconds", "generateName"))
_OF_STATUS = frozenset(("phase", "BoundDeviceID", "observedGeneration"))
_OF_TOLERATION = ("key", "operator", "value", "effect")
_OF_CONTAINER = frozenset(("name", "restartPolicy"))
_READ = frozenset((*mtgpu.ANNOTATIONS, *WISHES))
_LISTS = ("initContainers", "containers")
_MIRRORED = 16 << 10
"""Bytes, as JSON, of a Pod's metadata and of its status each that the status of its MtgpuPod repeats. Of one that has
more, the largest fields are left out; of its annotations mgpu's stay."""
_STATUS = 3 * _MIRRORED
"""Bytes of the status of an MtgpuPod: what is mirrored, and conditions."""
_SPEC = 32 << 10
"""Bytes of the parts of an MtgpuPod's spec that are read. 256 containers with names of 63 characters take 27 KiB."""
FINALIZERS = 16
"""Of an MtgpuPod with more, only so many are kept, and mgpu's own."""
_TEXT = 320
"""Characters of a text that is kept: longer than a qualified name, so that what is too long stays too long."""
_ROWS = 16
"""Conditions that are kept of a status that is too large."""
EXCESS = "excess"
"""Field of a kept MtgpuPod that says what of it is too large to be read."""


class Texts(Mapping[K, Raw]):
    """Objects as JSON text. Each is decoded when it is asked for, so that those of a node never are all at once."""

    def __init__(self, texts: Mapping[K, bytes]) -> None:
        self._texts = texts

    def __getitem__(self, key: K) -> Raw:
        return read_text(self._texts[key])

    def __iter__(self) -> Iterator[K]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, key: object) -> bool:
        return key in self._texts

    def text(self, key: K) -> bytes:
        return self._texts[key]


def text_of(raw: object) -> bytes:
    return orjson.dumps(raw)


def read_text(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(text)
    return found


def of_mtgpupod(raw: Raw) -> dict[str, Any]:
    """Return what is looked at of an MtgpuPod, within bounds. `read_mtgpupod` says the same of it as of the whole, but
    for one whose spec is too large: that has the field EXCESS.

    Only admission and the API server judge what no card depends on, such as the type of `spec.priority`.
    """
    meta, spec = raw["metadata"], raw.get("spec")
    kept: dict[str, Any] = {"metadata": _only(meta, _OF_META), "status": _status(raw.get("status") or {})}
    if meta.get("finalizers"):
        kept["metadata"]["finalizers"] = _finalizers(meta["finalizers"])
    if "annotations" in meta:
        kept["metadata"]["annotations"] = _annotations(meta["annotations"])
    if isinstance(spec, dict):
        kept["spec"] = {key: of(spec[key]) for key, of in _OF_SPEC.items() if key in spec}
        size = len(text_of(kept["spec"]))
        if size > _SPEC:
            kept["spec"] = _only(spec, frozenset(("nodeName",)))
            kept[EXCESS] = f"spec: mgpu reads {size} bytes of it (containers and tolerations), more than {_SPEC}"
    return kept


def of_own_pod(raw: Raw) -> dict[str, Any]:
    """Return what is looked at of a Pod that was made for an MtgpuPod: metadata and status, which the status of the
    MtgpuPod mirrors, each within `_MIRRORED` bytes, and its card.
    """
    meta = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    if len(text_of(meta.get("annotations"))) > _MIRRORED:
        meta["annotations"] = _of_mgpu(meta["annotations"])
    owners = [row for row in meta.get("ownerReferences") or () if row.get("controller")]
    less = {
        "annotations": _of_mgpu(meta.get("annotations") or {}),
        "ownerReferences": [row for row in owners if len(text_of(row)) <= _TEXT * 4],
    }
    status = raw.get("status") or {}
    cards = [{"env": _visible(container.get("env"))} for container in table_at(raw, "spec").get("containers") or ()]
    return {
        "metadata": _within(_MIRRORED, meta, _OF_MADE, less),
        "spec": {"containers": cards},
        "status": _within(_MIRRORED, status, frozenset(("phase",)), {"conditions": _conditions(status)}),
    }


def of_occupy_pod(raw: Raw) -> dict[str, Any]:
    """Return what is looked at of an occupy pod."""
    meta, status = raw["metadata"], raw.get("status") or {}
    labels = _only(meta.get("labels") or {}, frozenset((mtgpu.OCCUPY_LABEL,)))
    said = {"phase": status.get("phase"), "message": _cut(status.get("message")), "conditions": _conditions(status)}
    return {
        "metadata": {**_only(meta, _OF_META), "labels": labels},
        "spec": _only(raw.get("spec") or {}, frozenset(("nodeName",))),
        "status": {key: value for key, value in said.items() if value},
    }


def _within(most: int, table: Raw, always: frozenset[str], less: Raw) -> dict[str, Any]:
    """Return the table without its largest fields, so that it is within `most` bytes.

    always: the fields that stay. less: what stays of a field that is left out.
    """
    sizes = {key: len(text_of({key: value})) for key, value in table.items()}
    size, dropped = sum(sizes.values()), set()
    for key in sorted(sizes.keys() - always, key=lambda key: sizes[key], reverse=True):
        if size <= most:
            break
        dropped.add(key)
        size -= sizes[key]
    return {
        key: less.get(key) if key in dropped else table[key] for key in table if key not in dropped or less.get(key)
    }


def _status(status: Raw) -> Raw:
    """Return the status of an MtgpuPod. One that is too large is cut, and the controller writes it again."""
    if len(text_of(status)) <= _STATUS:
        return status
    uid = table_at(status, "PodObjectMeta").get("uid")
    kept = {**_only(status, _OF_STATUS), "conditions": _conditions(status)}
    return {**kept, "PodObjectMeta": {"uid": uid}} if isinstance(uid, str) else kept


def _conditions(status: Raw) -> list[dict[str, Any]]:
    """Return the conditions with their texts cut. `DisruptionTarget` says whether somebody deletes a Pod."""
    rows = [row for row in status.get("conditions") or () if isinstance(row, dict)]
    first = sorted(rows, key=lambda row: row.get("type") != "DisruptionTarget")[:_ROWS]
    return [{key[:_TEXT]: _cut(value) for key, value in row.items() if _is_short(value)} for row in first]


def _is_short(value: object) -> bool:
    return isinstance(value, str | int)


def _cut(value: Any) -> Any:
    return value[:_TEXT] if isinstance(value, str) else value


def _of_mgpu(annotations: Raw) -> dict[str, Any]:
    return {key: _cut(text) for key, text in annotations.items() if key in mtgpu.ANNOTATIONS}


def _finalizers(names: list[str]) -> list[str]:
    """Return the finalizers, or so many that the caller sees that these are not all."""
    if len(names) <= FINALIZERS:
        return names
    others = [name for name in names if name != mtgpu.FINALIZER][:FINALIZERS]
    return [*others, mtgpu.FINALIZER if mtgpu.FINALIZER in names else names[-1]]


def _tolerations(rows: object) -> object:
    """Return those that a taint `NoExecute` may meet, with the fields that are read. The API server refuses a Pod with
    fields of another type, so such a toleration tolerates nothing.
    """
    if not isinstance(rows, list):
        return None
    tables = [{key: row.get(key) for key in _OF_TOLERATION if row.get(key)} for row in rows if isinstance(row, dict)]
    right = [row for row in tables if all(isinstance(text, str) for text in row.values())]
    texts = {text_of({key: _cut(text) for key, text in row.items()}) for row in right if _may_evict(row)}
    return [read_text(text) for text in sorted(texts)]


def _may_evict(row: Raw) -> bool:
    return row.get("effect") in (None, "", "NoExecute")


def _only(table: Raw, keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key in keys}


def _annotations(said: object) -> object:
    """Those that are read, and those of a wrong type, which are problems."""
    if not isinstance(said, dict):
        return said
    return {key: _cut(text) for key, text in said.items() if key in _READ or not isinstance(text, str)}


def _containers(rows: object) -> object:
    """A list of a wrong type, or with an item of one, is kept as it is: then its problems stay the same."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return rows
    return [_container(row) for row in rows]


def _container(row: Raw) -> dict[str, Any]:
    kept = _only(row, _OF_CONTAINER)
    if "env" in row:
        kept["env"] = _visible(row["env"])
    if "resources" in row:
        kept["resources"] = _resources(row["resources"])
    return kept


def _visible(env: object) -> object:
    if not isinstance(env, list) or not all(isinstance(row, dict) for row in env):
        return env
    return [row for row in env if row.get("name") == VISIBLE_DEVICES]


def _resources(said: object) -> object:
    if not isinstance(said, dict):
        return said
    return {kind: _amounts(said[kind]) for kind in ("requests", "limits") if kind in said}


def _amounts(said: object) -> object:
    if not isinstance(said, dict):
        return said
    return {name: text for name, text in said.items() if _is_read(name, text)}


def _is_read(name: str, amount: object) -> bool:
    right = isinstance(amount, str | int | float) and not isinstance(amount, bool)
    return not right or name == SHARE or vocabulary_of(name) is not None


_OF_SPEC: Mapping[str, Callable[[object], object]] = {
    "nodeName": _cut,
    "tolerations": _tolerations,
    **dict.fromkeys(_LISTS, _containers),
}
