"""What planning writes: the annotations of a Node, and under MPS the ConfigMap that follows from them."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from mgpu.kube import Api, ApiError
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.mps_config import read_config, write_config
from mgpu.model.node_slices import ANNOTATION, PLANNED, NodeSlices, read_slices, with_spec, write_planned
from mgpu.model.pods import read_node
from mgpu.model.slice_names import Counts, counts, mode_of
from mgpu.settings import Settings
from scheduler.cluster.slice_state import Plan

log = logging.getLogger(__name__)

_CONFLICTS = 20
"""Each is somebody's write that succeeded; more of one node in a row do not come."""


class Writer:
    """Every call raises ApiError, Unreachable and RetryLater where it is not known whether it was written: call it
    again. maps, only_map: the collection in which the ConfigMap is, and the query for it alone.
    """

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        own = settings.dialects.slices
        self._name = own.config_map
        self.maps = f"/api/v1/namespaces/{quote(own.config_map_namespace, safe='')}/configmaps"
        self.only_map = {"fieldSelector": f"metadata.name={own.config_map}"}
        self._map = f"{self.maps}/{quote(own.config_map, safe='')}"

    def plan(self, plan: Plan) -> str:
        """ "" as soon as the plan stands on its Node; else why it must never be written any more."""
        path = f"/api/v1/nodes/{quote(plan.node, safe='')}"
        for _ in range(_CONFLICTS):
            try:
                raw = self._api.get(path)
                node = read_node(raw)
                found = read_slices(node)
                if found.partitioning.plan == plan.id and found.planned == plan.slices:
                    return ""
                why = _overtaken(plan, found)
                if why:
                    return why
                text = with_spec(node.annotations.get(ANNOTATION), counts(plan.slices), plan.id)
                said = {ANNOTATION: text, PLANNED: write_planned(plan.slices, plan.id, plan.standing)}
                precondition = {key: raw["metadata"][key] for key in ("uid", "resourceVersion")}
                self._api.patch(path, {"metadata": {**precondition, "annotations": said}})
            except BadObject as error:
                return str(error)
            except ApiError as error:
                if error.status == 409:
                    continue
                if error.status == 429 or error.status >= 500:
                    raise
                return str(error)
            return ""
        raise RetryLater(f"node {plan.node} changes faster than it can be written")

    def config(self, node: str, spec: Counts) -> None:
        """Make the ConfigMap say this of a node, and leave what it says of others as it is."""
        text = write_config(spec)
        for _ in range(_CONFLICTS):
            try:
                if not self._write_config(node, spec, text):
                    return
                log.info("sharing configuration written", extra={"node": node})
            except ApiError as error:
                if error.status != 409:
                    raise
            else:
                return
        raise RetryLater(f"ConfigMap {self._name} changes faster than it can be written")

    def _write_config(self, node: str, spec: Counts, text: str) -> bool:
        try:
            raw = self._api.get(self._map)
        except ApiError as error:
            if error.status != 404:
                raise
            meta = {"name": self._name}
            self._api.create(
                self.maps, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {node: text}}
            )
            return True
        if says(raw.get("data") or {}, node, spec):
            return False
        precondition = {key: raw["metadata"][key] for key in ("uid", "resourceVersion")}
        self._api.patch(self._map, {"metadata": precondition, "data": {node: text}})
        return True


class Configs:
    """Thread-safe. The ConfigMap as the watch brings it. changed: told of the keys that have; must return at once."""

    def __init__(self, changed: Callable[[Collection[str]], None]) -> None:
        self._lock = threading.Lock()
        self._data: Mapping[str, str] = {}
        self._tell_changed = changed

    def changed(self, raw: Mapping[str, Any]) -> None:
        self._set(raw.get("data") or {})

    def gone(self, raw: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._set({})

    def says(self, node: str, spec: Counts) -> bool:
        with self._lock:
            return says(self._data, node, spec)

    def _set(self, data: Mapping[str, str]) -> None:
        with self._lock:
            before, self._data = self._data, data
        self._tell_changed({key for key in {*before, *data} if before.get(key) != data.get(key)})


def says(data: Mapping[str, str], node: str, spec: Counts) -> bool:
    """Whether a ConfigMap has an entry of the node's own that comes to this, however it is written."""
    return node in data and _read(data[node]) == {card: dict(names) for card, names in spec.items() if names}


@lru_cache(maxsize=1000)
def _read(text: str) -> Counts | None:
    """None: it cannot be read. Cached: YAML takes 12 ms a node, and it is asked whenever a node's pods change."""
    try:
        return read_config(text)
    except BadObject:
        return None


def _overtaken(plan: Plan, found: NodeSlices) -> str:
    """Why a plan does not suit the node any more, as it is now; "": it does."""
    partitioning = found.partitioning
    if partitioning.plan != plan.before:
        return f"plan {partitioning.plan} has come before it"
    if any(mode_of(s.name) != found.mode for s in plan.slices):
        return f"the node's cards are cut by {found.mode or 'nobody'} now"
    kept = {*plan.slices}
    used = next((s for s in found.made if s.pod and s.place not in kept), None)
    return "" if used is None else f"card {used.card} has a {used.name} at {used.start} that is in use by now"
