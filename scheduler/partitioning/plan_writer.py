"""Writes plans to Nodes and, under MPS, the resulting sharing configurations to a ConfigMap.

The controller and the agent of a node write the same annotation of the Node, and all nodes and administrators share one
ConfigMap. So every change is conditional on the resourceVersion that was read, and never overwrites what another author
has written. The partition controller uses this module. `scheduler.runtime` creates the `PlanWriter`, and
`scheduler.watches` the watch of the ConfigMap.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.mps_config import read_config, write_config
from mgpu.model.node_slices import ANNOTATION, PLANNED, NodeSlices, read_slices, with_spec, write_planned
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MPS, SliceCounts, count_slices, mode_of
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.slice_state import PartitionPlan
from scheduler.engine.partitioning.partitionable_node import PartitionableNode

log = logging.getLogger(__name__)

_TRIES = 20
"""The most attempts at one write. An attempt conflicts only if another author has written in the meantime."""
_UNOBSERVED_SECONDS = 60.0
"""The time that the watch may take to deliver a written plan. After that the plan is compared with the Node again."""
_OUTDATED_SECONDS = 5.0
"""The time for which a node gets no new plan after its plan was dropped, unless the node changes."""


class PlanWriter:
    """Writes plans and sharing configurations to the API server.

    If a method raises ApiError, Unreachable or RetryLater, it is not known whether the write has succeeded. The caller
    should repeat the call: a write that has succeeded is not made twice.

    Attributes:
        maps: The API path of the ConfigMaps in the namespace of the sharing configurations.
        only_map: The query that selects the ConfigMap of sharing configurations in a list or watch.
    """

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        own = settings.dialects.slices
        self._name = own.config_map
        self.maps = f"/api/v1/namespaces/{quote(own.config_map_namespace, safe='')}/configmaps"
        self.only_map = {"fieldSelector": f"metadata.name={own.config_map}"}
        self._map = f"{self.maps}/{quote(own.config_map, safe='')}"

    def write_plan(self, plan: PartitionPlan) -> str | None:
        """Write a plan to its Node.

        Returns:
            None if the Node has the plan now. Otherwise the reason why the plan must be dropped: it is outdated, the
            API server refuses it, or the Node cannot be read.
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
                text = with_spec(node.annotations.get(ANNOTATION), count_slices(plan.slices), plan.id)
                annotations = {ANNOTATION: text, PLANNED: write_planned(plan.slices, plan.id, plan.preexisting)}
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
        raise RetryLater(f"node {plan.node} changes too often: {_TRIES} writes in a row failed with a conflict")

    def write_config(self, node: str, spec: SliceCounts) -> None:
        """Write the entry of a node to the ConfigMap. Create the ConfigMap if it does not exist."""
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
        raise RetryLater(f"ConfigMap {self._name} changes too often: {_TRIES} writes in a row failed with a conflict")

    def _try_config(self, node: str, spec: SliceCounts, text: str) -> bool:
        """Write the entry unless the ConfigMap has it already. Return whether a write was necessary."""
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


class PlanPublisher:
    """Writes the new plans of the ClusterCache to Nodes, and those for MPS also to the ConfigMap. Not thread-safe.

    Args:
        configs: The ConfigMap as the watch has delivered it.
        may_decide: A function that raises RetryLater while this process must not write.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        writer: PlanWriter,
        configs: "SharingConfigs",
        may_decide: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._writer = writer
        self._configs = configs
        self._may_decide = may_decide
        self._clock = clock
        self._written: dict[str, tuple[int, float]] = {}  # By node, its last plan and the time of the write.
        self._outdated: dict[str, tuple[int, float]] = {}  # By node, its version and the end of its pause.
        self._configs_due: set[str] = set()

    def observe(self, target: PartitionableNode) -> None:
        """For a node with MPS and a plan, let `publish` compare the entry in the ConfigMap with the annotation."""
        if target.observed.mode == MPS and target.observed.partitioning.plan is not None:
            self._configs_due.add(target.node.name)

    def forget(self, node: str) -> None:
        self._written.pop(node, None)
        self._outdated.pop(node, None)
        self._configs_due.discard(node)

    def is_busy(self) -> bool:
        """Return whether a plan or an entry is not written yet, or the watch has not delivered a plan yet."""
        return bool(self._configs_due or self._cluster.partitions.plans())

    def is_paused(self, target: PartitionableNode) -> bool:
        """Return whether the node gets no plan for now, because its last plan was dropped."""
        version, until = self._outdated.get(target.node.name, (-1, 0.0))
        return version == target.version and self._clock() < until

    def publish(self) -> None:
        """Write the plans and entries that are due. Raises RetryLater if this process must not write them."""
        for plan in self._cluster.partitions.plans():
            number, at = self._written.get(plan.node, (-1, 0.0))
            if number != plan.id or self._clock() >= at + _UNOBSERVED_SECONDS:
                self._publish_plan(plan)
        unwritten = {p.node for p in self._cluster.partitions.plans() if self._written.get(p.node, (-1,))[0] != p.id}
        for name in sorted(self._configs_due - unwritten):
            if not self._publish_config(name):
                return

    def _publish_plan(self, plan: PartitionPlan) -> None:
        self._may_decide()
        extra = {"node": plan.node, "plan": plan.id}
        try:
            reason = self._writer.write_plan(plan)
        except (ApiError, Unreachable, RetryLater) as error:
            log.warning("plan not written yet: %s", error, extra=extra)
            return
        if reason is not None:
            metrics.PLANS.labels("dropped").inc()
            log.warning("plan dropped: %s", reason, extra=extra)
            self._cluster.partitions.drop_plan(plan)
            target = self._cluster.partitions.get(plan.node)
            self._outdated[plan.node] = (target.version if target else -1, self._clock() + _OUTDATED_SECONDS)
        else:
            metrics.PLANS.labels("written").inc()
            log.info("plan written", extra=extra)
            self._written[plan.node] = (plan.id, self._clock())
            self._configs_due.add(plan.node)

    def _publish_config(self, name: str) -> bool:
        """Write the entry of the node if it differs from the node's annotation. Return False if the write failed."""
        target = self._cluster.partitions.get(name)
        if (
            target
            and not target.problem
            and target.observed.mode == MPS
            and target.observed.partitioning.plan is not None
        ):
            spec = target.observed.partitioning.spec
            self._may_decide()
            try:
                if not self._configs.has(name, spec):
                    self._writer.write_config(name, spec)
            except (ApiError, Unreachable, RetryLater) as error:
                log.warning("sharing configuration not written yet: %s", error, extra={"node": name})
                return False
        self._configs_due.discard(name)
        return True


class SharingConfigs:
    """The ConfigMap of sharing configurations as the watch has delivered it. Thread-safe; its lock guards the data.

    Args:
        nodes_changed: A function that is called with the names of the nodes whose entries have changed. It must not
            block.
    """

    def __init__(self, nodes_changed: Callable[[Collection[str]], None]) -> None:
        self._nodes_changed = nodes_changed
        self._lock = threading.Lock()
        self._data: Mapping[str, str] = {}

    def changed(self, raw: Mapping[str, Any]) -> None:
        self._set(raw.get("data") or {})

    def gone(self, raw: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._set({})

    def has(self, node: str, spec: SliceCounts) -> bool:
        """Return whether the entry of the node has these slices, however its YAML is formatted."""
        with self._lock:
            return _has_entry(self._data, node, spec)

    def _set(self, data: Mapping[str, str]) -> None:
        with self._lock:
            before, self._data = self._data, data
        self._nodes_changed({key for key in {*before, *data} if before.get(key) != data.get(key)})


def _has_entry(data: Mapping[str, str], node: str, spec: SliceCounts) -> bool:
    return node in data and _read(data[node]) == {card: dict(names) for card, names in spec.items() if names}


@lru_cache(maxsize=1000)
def _read(text: str) -> SliceCounts | None:
    """Return the slices of an entry, or None if the entry is invalid.

    Results are cached, because parsing the YAML of one node takes 12 ms, and each change of the node's pods causes a
    comparison.
    """
    try:
        return read_config(text)
    except BadObject:
        return None


def _outdated_reason(plan: PartitionPlan, found: NodeSlices) -> str | None:
    """Return the reason why the plan is outdated for its node, or None if it is not."""
    if found.partitioning.plan != plan.previous_id:
        number = found.partitioning.plan
        return f"the node has {'no plan' if number is None else f'plan {number}'} by now"
    if any(mode_of(s.name) != found.mode for s in plan.slices):
        return f"the cards of the node are {f'partitioned by {found.mode}' if found.mode else 'not partitioned'} now"
    planned = {*plan.slices}
    used = next((s for s in found.existing if s.pod and s.place not in planned), None)
    return None if used is None else f"card {used.card} has a {used.name} at {used.start} that is in use by now"
