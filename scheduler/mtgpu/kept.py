"""What the scheduler keeps of MtgpuPods and of the Pods that are made for them. Pure.

Users choose how large these are, and there may be thousands: of each the parts are kept that are looked at, as JSON
text, which takes a tenth of what the decoded objects take. What else an MtgpuPod has is read from the API server when
its Pod is created.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from mgpu.dialects import mtgpu
from mgpu.dialects.node_resources import SHARE
from mgpu.dialects.vocabulary import vocabulary_of
from mgpu.model.pods import VISIBLE_DEVICES
from mgpu.model.wishes import ALL as WISHES

Raw = Mapping[str, Any]

_NAMES = ("namespace", "name", "uid", "resourceVersion", "generation")
_OF_META = frozenset((*_NAMES, "creationTimestamp", "deletionTimestamp", "finalizers"))
_OF_SPEC = frozenset(("nodeName", "tolerations"))
_OF_CONTAINER = frozenset(("name", "restartPolicy"))
_READ = frozenset((*mtgpu.ANNOTATIONS, *WISHES))
_LISTS = ("initContainers", "containers")
_MIRRORED = 16 << 10
"""Bytes of a Pod's annotations that the status of its MtgpuPod repeats. Of Pods with more only mgpu's are."""


def text_of(raw: Raw) -> bytes:
    return orjson.dumps(raw)


def read_text(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(text)
    return found


def of_mtgpupod(raw: Raw) -> dict[str, Any]:
    """What is looked at of an MtgpuPod. `read_mtgpupod` says the same of it as of the whole.

    Only admission and the API server judge what no card depends on, such as the type of `spec.priority`.
    """
    meta, spec = raw["metadata"], raw.get("spec")
    kept: dict[str, Any] = {"metadata": _only(meta, _OF_META), "status": raw.get("status") or {}}
    if "annotations" in meta:
        kept["metadata"]["annotations"] = _annotations(meta["annotations"])
    if isinstance(spec, dict):
        kept["spec"] = _only(spec, _OF_SPEC) | {key: _containers(spec[key]) for key in _LISTS if key in spec}
    return kept


def of_own_pod(raw: Raw) -> dict[str, Any]:
    """What is looked at of a Pod that was made for an MtgpuPod: its status mirrors metadata and status of this one."""
    meta = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    said = meta.get("annotations") or {}
    if sum(len(key) + len(text) for key, text in said.items()) > _MIRRORED:
        meta["annotations"] = {key: text for key, text in said.items() if key in mtgpu.ANNOTATIONS}
    containers = (raw.get("spec") or {}).get("containers") or ()
    cards = [{"env": _visible(container.get("env"))} for container in containers]
    return {"metadata": meta, "spec": {"containers": cards}, "status": raw.get("status") or {}}


def of_occupy_pod(raw: Raw) -> dict[str, Any]:
    """What is looked at of an occupy pod."""
    spec = raw.get("spec") or {}
    meta = _only(raw["metadata"], _OF_META | {"labels"})
    return {"metadata": meta, "spec": _only(spec, _OF_SPEC), "status": raw.get("status") or {}}


def _only(table: Raw, keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key in keys}


def _annotations(said: object) -> object:
    """Those that are read, and those of a wrong type, which are problems."""
    if not isinstance(said, dict):
        return said
    return {key: text for key, text in said.items() if key in _READ or not isinstance(text, str)}


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
