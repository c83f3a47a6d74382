"""The writes of the partition controller: annotations of a Node, and under MPS the ConfigMap that follows from them.

The agent of a node and the controller write one annotation, and any number of authors one ConfigMap. Every write is
conditional on the version that was read, so that nothing is lost that another author wrote.
"""

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

_TRIES = 20
"""Each is lost to the write of another author that succeeded; more of one node in a row do not come."""


class PlanWriter:
    """Writes plans and sharing configurations.

    Every call raises ApiError, Unreachable or RetryLater if it is not known whether the write came through; repeat the
    call then.

    Attributes:
        maps: path of the collection that has the ConfigMap.
        only_map: query for this ConfigMap alone.
    """

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        own = settings.dialects.slices
        self._name = own.config_map
        self.maps = f"/api/v1/namespaces/{quote(own.config_map_namespace, safe='')}/configmaps"
        self.only_map = {"fieldSelector": f"metadata.name={own.config_map}"}
        self._map = f"{self.maps}/{quote(own.config_map, safe='')}"

    def write_plan(self, plan: Plan) -> str | None:
        """Write a plan to its Node.

        Returns:
            None if the plan is on the Node now, else the reason why it must not be written any more.
        """
        path = f"/api/v1/nodes/{quote(plan.node, safe='')}"
        for _ in range(_TRIES):
            try:
                raw = self._api.get(path)
                node = read_node(raw)
                found = read_slices(node)
                if found.partitioning.plan == plan.id and found.planned == plan.slices:
                    return None
                reason = _outdated_reason(plan, found)
                if reason is not None:
                    return reason
                text = with_spec(node.annotations.get(ANNOTATION), counts(plan.slices), plan.id)
                annotations = {ANNOTATION: text, PLANNED: write_planned(plan.slices, plan.id, plan.standing)}
                precondition = {key: raw["metadata"][key] for key in ("uid", "resourceVersion")}
                self._api.patch(path, {"metadata": {**precondition, "annotations": annotations}})
            except BadObject as error:
                return str(error)
            except ApiError as error:
                if error.status == 409:
                    continue
                if error.status == 429 or error.status >= 500:
                    raise
                return str(error)
            return None
        raise RetryLater(f"node {plan.node} changes faster than it can be written")

    def write_config(self, node: str, spec: Counts) -> None:
        """Write the entry of a node into the ConfigMap, and leave the entries of others as they are."""
        text = write_config(spec)
        for _ in range(_TRIES):
            try:
                if not self._try_config(node, spec, text):
                    return
                log.info("sharing configuration written", extra={"node": node})
            except ApiError as error:
                if error.status != 409:
                    raise
            else:
                return
        raise RetryLater(f"ConfigMap {self._name} changes faster than it can be written")

    def _try_config(self, node: str, spec: Counts, text: str) -> bool:
        """Return whether anything was written."""
        try:
            raw = self._api.get(self._map)
        except ApiError as error:
            if error.status != 404:
                raise
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self._name}, "data": {node: text}}
            self._api.create(self.maps, body)
            return True
        if _has_entry(raw.get("data") or {}, node, spec):
            return False
        precondition = {key: raw["metadata"][key] for key in ("uid", "resourceVersion")}
        self._api.patch(self._map, {"metadata": precondition, "data": {node: text}})
        return True


class SharingConfigs:
    """The ConfigMap of sharing configurations as the watch delivers it. Thread-safe.

    Args:
        nodes_changed: called with the nodes whose entries have changed: all nodes share the ConfigMap, and to look at
            each of them at each change would cost more the more there are. Must return at once.
    """

    def __init__(self, nodes_changed: Callable[[Collection[str]], None]) -> None:
        self._nodes_changed = nodes_changed
        self._lock = threading.Lock()
        self._data: Mapping[str, str] = {}

    def changed(self, raw: Mapping[str, Any]) -> None:
        self._set(raw.get("data") or {})

    def gone(self, raw: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._set({})

    def has(self, node: str, spec: Counts) -> bool:
        """Return whether the entry of the node means this, however it is written."""
        with self._lock:
            return _has_entry(self._data, node, spec)

    def _set(self, data: Mapping[str, str]) -> None:
        with self._lock:
            before, self._data = self._data, data
        self._nodes_changed({key for key in {*before, *data} if before.get(key) != data.get(key)})


def _has_entry(data: Mapping[str, str], node: str, spec: Counts) -> bool:
    return node in data and _read(data[node]) == {card: dict(names) for card, names in spec.items() if names}


@lru_cache(maxsize=1000)
def _read(text: str) -> Counts | None:
    """Return the entry, or None if it cannot be read.

    Cached: YAML takes 12 ms for a node, and the entry is compared whenever the pods of the node change.
    """
    try:
        return read_config(text)
    except BadObject:
        return None


def _outdated_reason(plan: Plan, found: NodeSlices) -> str | None:
    """Return why a plan does not suit its node as it is now, or None if it does."""
    if found.partitioning.plan != plan.before:
        return f"plan {found.partitioning.plan} has come before it"
    if any(mode_of(s.name) != found.mode for s in plan.slices):
        return f"the cards of the node are partitioned by {found.mode or 'nothing'} now"
    kept = {*plan.slices}
    used = next((s for s in found.made if s.pod and s.place not in kept), None)
    return None if used is None else f"card {used.card} has a {used.name} at {used.start} that is in use by now"
