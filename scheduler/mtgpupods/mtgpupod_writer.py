"""Writes finalizers and statuses of MtgpuPods, and creates and deletes their Pods and occupy pods.

`MtgpuPodApi` makes the API calls, and `MtgpuPodWriter` carries out the decisions of the node plan. Every write that
changes or deletes an object contains the resourceVersion or the UID that was observed. If the object has changed since,
the API server refuses the write (409, 404), and the watch soon delivers the current object. Nothing in this module is
thread-safe. The MtgpuPod controller uses the module on its thread.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.dialects.mtgpu_pods import manifest
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.kube import Api, ApiError
from mgpu.kube.client import JSON_PATCH
from mgpu.settings import Settings
from scheduler.cluster.mtgpupod_objects import key_of
from scheduler.cluster.stored_objects import FINALIZERS
from scheduler.decisions.decider import pod_path
from scheduler.mtgpupods import occupy_pods
from scheduler.mtgpupods.fairness import Backoffs
from scheduler.mtgpupods.mtgpupod_status import (
    FALSE,
    Condition,
    DesiredMtgpuPod,
    Transition,
    failed_status,
    next_status,
    transitions,
)
from scheduler.mtgpupods.observation import is_pod_of, occupy_pod_key, read_stored
from scheduler.mtgpupods.observed_node import ObservedNode
from scheduler.mtgpupods.occupy_pods import CreateOccupyPod, DeleteOccupyPod
from scheduler.work_queue import Queue

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
RecordEvent = Callable[[dict[str, Any], Transition], None]
"""Creates an Event about a transition, given a reference to the object. It must not block."""
_DENIED_BY_ADMISSION = ("admission webhook", "is forbidden: ")
"""Texts in the messages of admission webhooks (400 by default) and ValidatingAdmissionPolicies (422) that deny a Pod.

Admission may allow the same Pod later. A Pod that the API server itself calls invalid (400, 422) stays invalid.
"""


class StaleObject(Exception):
    """An observed object is out of date. The watch is about to deliver the current one."""


class MtgpuPodApi:
    """Makes API calls. Each method may raise ApiError or Unreachable, and a method that writes also RetryLater.

    Args:
        before_write: A function that is called before each write, and raises RetryLater while this process must not
            write.
    """

    def __init__(self, api: Api, before_write: Callable[[], None]) -> None:
        self._api = api
        self._before_write = before_write

    def mtgpupod(self, item: Raw) -> Raw:
        """Read the whole MtgpuPod from the API server. The cache stores only parts of it."""
        return self._api.get(_path(item))

    def pod(self, namespace: str, name: str) -> Raw | None:
        """Read the Pod from the API server. Return None if it does not exist."""
        try:
            return self._api.get(pod_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def add_finalizer(self, item: Raw) -> Raw:
        item = self._with_all_finalizers(item)
        return self._write_finalizers(item, [*_finalizers(item), mtgpu.FINALIZER])

    def remove_finalizer(self, item: Raw) -> None:
        item = self._with_all_finalizers(item)
        self._write_finalizers(item, [name for name in _finalizers(item) if name != mtgpu.FINALIZER])

    def write_status(self, item: Raw, status: Raw) -> Raw:
        """Replace the whole status and return the resulting MtgpuPod.

        The request is a JSON patch, because a merge patch does not remove the fields that it omits. It contains the
        resourceVersion, so that the API server answers 409 if the MtgpuPod has changed.
        """
        self._before_write()
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": item["metadata"]["resourceVersion"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        return self._api.patch(f"{_path(item)}/status", patch, JSON_PATCH)

    def create_pod(self, pod: Raw) -> None:
        self._before_write()
        self._api.create(f"/api/v1/namespaces/{quote(pod['metadata']['namespace'], safe='')}/pods", pod)

    def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool = False) -> None:
        """Delete the Pod if it exists and has this UID. `force` means without a grace period."""
        self._before_write()
        grace = {"gracePeriodSeconds": 0} if force else {}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, **grace}
        try:
            self._api.delete(pod_path(namespace, name), options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _with_all_finalizers(self, item: Raw) -> Raw:
        """Return the MtgpuPod with all its finalizers. Raises ApiError (409) if it has changed.

        The cache stores at most `FINALIZERS` + 1 finalizers of an MtgpuPod. If it has stored that many, there may be
        more, so the MtgpuPod is read from the API server.
        """
        if len(_finalizers(item)) <= FINALIZERS:
            return item
        whole = self.mtgpupod(item)
        if whole["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{_path(item)} has changed since it was observed")
        return whole

    def _write_finalizers(self, item: Raw, names: list[str]) -> Raw:
        self._before_write()
        version = item["metadata"]["resourceVersion"]
        return self._api.patch(_path(item), {"metadata": {"resourceVersion": version, "finalizers": names}})


def has_finalizer(item: Raw) -> bool:
    return mtgpu.FINALIZER in _finalizers(item)


def _finalizers(item: Raw) -> list[str]:
    return [*(item["metadata"].get("finalizers") or ())]


def _path(item: Raw) -> str:
    meta = item["metadata"]
    namespace, name = (quote(meta[key], safe="") for key in ("namespace", "name"))
    return f"/apis/{mtgpu.API_VERSION}/namespaces/{namespace}/mtgpupods/{name}"


@dataclass(slots=True)
class OccupyPodFailures:
    """The occupy pods of a node that could not be created.

    Attributes:
        any: Whether the creation of any occupy pod failed.
        conditions: By GPUID, the condition Bound of its MtgpuPods. A GPUID is missing if its occupy pod exists
            already (409), because the watch soon delivers this pod.
    """

    any: bool = False
    conditions: dict[str, Condition] = field(default_factory=dict)


class MtgpuPodWriter:
    """Carries out the decisions of node plans.

    Args:
        records: Seals the allocation records of Pods.
        queue: The queue of nodes to reconcile.
        backoffs: The pauses between attempts to create a Pod, by node and the UID of the MtgpuPod or the GPUID of the
            occupy pod.
        event: Creates an Event for a transition of a condition.
    """

    def __init__(
        self,
        api: MtgpuPodApi,
        settings: Settings,
        records: RecordVerifier,
        queue: Queue,
        backoffs: Backoffs,
        event: RecordEvent,
    ) -> None:
        self._api = api
        self._settings = settings
        self._records = records
        self._queue = queue
        self._backoffs = backoffs
        self._record_event = event

    # Occupy pods.

    def create_occupy_pods(
        self, node: ObservedNode, steps: Sequence[CreateOccupyPod | DeleteOccupyPod]
    ) -> OccupyPodFailures:
        failures = OccupyPodFailures()
        for gpuid, occupy_pod in node.occupy_pods.items():
            if occupy_pod.running:
                self._backoffs.reset(node.name, gpuid)
        for step in steps:
            if isinstance(step, CreateOccupyPod) and self._is_due(node.name, step.gpuid):
                try:
                    self._api.create_pod(occupy_pods.manifest(node.name, step.gpuid, self._settings))
                except ApiError as error:
                    failures.any = True
                    if error.status != 409:
                        extra = {"node": node.name, "gpuid": step.gpuid}
                        log.warning("occupy pod not created: %s", error, extra=extra)
                        text = f"the occupy pod of GPUID {step.gpuid} could not be created: {error.message}"
                        failures.conditions[step.gpuid] = Condition(FALSE, "OccupyPodRefused", text)
        return failures

    def delete_occupy_pods(self, node: ObservedNode, steps: Sequence[CreateOccupyPod | DeleteOccupyPod]) -> None:
        for step in steps:
            if isinstance(step, DeleteOccupyPod):
                self._api.delete_pod(*occupy_pod_key(node.name, step.gpuid), step.uid, force=step.force)
                occupy_pod = node.occupy_pods.get(step.gpuid)
                if occupy_pod is not None and occupy_pod.ended:
                    self._backoffs.extend(node.name, step.gpuid)  # A new occupy pod may end as soon as it is created.

    # One MtgpuPod.

    def write(self, item: Raw, pod: MtgpuPod | None, own: Raw | None, desired: DesiredMtgpuPod) -> None:
        """Carry out the decision about one MtgpuPod.

        Args:
            item: The MtgpuPod as JSON.
            pod: The same MtgpuPod, or None if it is invalid.
            own: The Pod that was created for it, as JSON, or None.
        """
        if desired.delete_pod and own is not None:
            self._api.delete_pod(*key_of(item), own["metadata"]["uid"], force=desired.force)
        if desired.remove_finalizer:
            if has_finalizer(item):
                self._remove_finalizer(item, force=desired.force)
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if desired.bind:
            # BoundDeviceID is written before the Pod is created. Otherwise, after a crash between the two writes, the
            # next plan could assign another card while the Pod already runs.
            item = self._write_status(item, next_status(item, desired, own, now))
            desired = replace(desired, bind=None)
        status: Raw | None = None
        if desired.create_pod and pod is not None and desired.card is not None and self._is_due(pod.node, pod.uid):
            made = manifest(self._whole(item, pod), pod, desired.card.uuid, desired.card.index)
            made["metadata"]["annotations"] |= self._records.sealed_mtgpu(made, pod.uid)
            failure = self._create_pod(pod, made)
            if isinstance(failure, str):
                status = failed_status(item, desired, failure, now)
            else:
                desired = replace(desired, created=failure)
        self._write_status(item, status or next_status(item, desired, own, now))

    def _whole(self, item: Raw, pod: MtgpuPod) -> Raw:
        """Read the whole MtgpuPod. Raises StaleObject if it is not valid, or if its placement differs from `pod`."""
        whole = self._api.mtgpupod(item)
        present = read_stored(whole)
        if not isinstance(present, MtgpuPod) or present.placement_key != pod.placement_key:
            raise StaleObject(f"MtgpuPod {pod.key} has changed since it was observed")
        return whole

    def _create_pod(self, pod: MtgpuPod, made: Raw) -> Condition | str | None:
        """Create the Pod of an MtgpuPod.

        Returns:
            None if the Pod was created or another attempt may soon succeed, the condition PodCreated if the API server
            denied the Pod, or the message of the API server if the Pod is invalid and can never be created.
        """
        try:
            self._api.create_pod(made)
        except ApiError as error:
            if error.status in (400, 422) and not any(text in error.message for text in _DENIED_BY_ADMISSION):
                return error.message
            # A tenant can create any number of MtgpuPods whose Pods are denied, so the pauses must grow.
            self._backoffs.extend(pod.node, pod.uid)
            self._queue.add(pod.node, self._backoffs.remaining(pod.node, pod.uid))
            if error.status in (404, 409, 429) or error.status >= 500:
                return None
            return Condition(FALSE, "PodForbidden", error.message)
        self._backoffs.extend(pod.node, pod.uid)
        return None

    def _is_due(self, node: str, name: str) -> bool:
        """Return whether a pod may be created now. If not, queue the node for the end of the pause of the pod.

        The pauses limit how often a pod is created again if the kubelet rejects it or it is preempted each time.

        Args:
            name: The GPUID of an occupy pod, or the UID of an MtgpuPod.
        """
        remaining = self._backoffs.remaining(node, name)
        if remaining:
            self._queue.add(node, remaining)
        return not remaining

    def _remove_finalizer(self, item: Raw, *, force: bool) -> None:
        """Remove the finalizer.

        If the MtgpuPod still has a Pod, which the watch has not delivered yet, delete the Pod and raise StaleObject.
        """
        found = self._api.pod(*key_of(item))
        if found is not None and is_pod_of(found, item):
            self._api.delete_pod(*key_of(item), found["metadata"]["uid"], force=force)
            raise StaleObject(f"Pod {'/'.join(key_of(item))} was not observed yet")
        self._api.remove_finalizer(item)

    def _write_status(self, item: Raw, status: Raw) -> Raw:
        """Write the status if it has changed, create Events for its transitions, and return the current MtgpuPod."""
        before = item.get("status") or {}
        if status == before:
            return item
        written = self._api.write_status(item, status)
        meta = item["metadata"]
        named = {key: meta[key] for key in ("namespace", "name", "uid")}
        for transition in transitions(before, status):
            self._record_event({"apiVersion": mtgpu.API_VERSION, "kind": mtgpu.KIND, **named}, transition)
        return written
