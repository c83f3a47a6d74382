"""Implements the resourceclaim controller of kube-controller-manager.

For each pod it creates the ResourceClaims of the templates that the pod names. It removes the pods that are gone or
have ended from the consumers of claims, and then the allocation of a claim without consumers. It deletes the claims
that were created for a pod once the pod has ended; the garbage collector deletes them if the pod is gone.

Source: pkg/controller/resourceclaim in Kubernetes.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from mgpu.kube.reflector import Reflector
from playground.controller_manager.claim_index import ClaimIndex, Name, claim_names, name_of, owning_pod

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
FINALIZER = "resource.kubernetes.io/delete-protection"
_ROOT = "/apis/resource.k8s.io/v1"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_MOST_CONSUMERS = 256
_RETRY_SECONDS = 0.2


class _Postponed(Exception):
    """A step must be tried again later. The text is the reason."""


class PodClaims:
    """Runs the controller in a thread. It may be started once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._events = Recorder(api, "resource_claim")
        self._wake = threading.Condition()  # guards the attributes down to `_stopped`
        self._known = ClaimIndex()
        self._due: dict[tuple[str, Name], None] = {}  # what to look at: "pod" or "claim", in the order of arrival
        self._stopped = False
        # The claims that were created and that the watch may not have shown yet, by the UID of the pod and the name of
        # the claim in the pod.
        self._created: dict[tuple[str, str], str] = {}
        self._watches = (
            Reflector(api, "/api/v1/pods", self._pod_changed, self._pod_gone),
            Reflector(api, f"{_ROOT}/resourceclaims", self._claim_changed, self._claim_gone, optional=True),
        )
        self._thread = threading.Thread(target=self._run, name="pod-claims", daemon=True)

    def start(self) -> None:
        for watch in self._watches:
            watch.start()
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        for watch in self._watches:
            watch.stop()
        self._thread.join(5)
        self._events.stop()

    def _pod_changed(self, pod: Raw) -> None:
        with self._wake:
            self._known.set_pod(pod)
            if pod["spec"].get("resourceClaims"):
                self._add("pod", name_of(pod))
            if _is_done(pod):
                self._add_related(pod)

    def _pod_gone(self, pod: Raw) -> None:
        with self._wake:
            known = self._known.remove_pod(pod)
            if known is not None:
                self._add_related(known)

    def _claim_changed(self, claim: Raw) -> None:
        with self._wake:
            self._known.set_claim(claim)
            self._add("claim", name_of(claim))
            for pod in self._known.users(name_of(claim)):
                self._add("pod", pod)

    def _claim_gone(self, claim: Raw) -> None:
        with self._wake:
            self._known.remove_claim(claim)
            for pod in self._known.users(name_of(claim)):
                self._add("pod", pod)

    def _add_related(self, pod: Raw) -> None:
        """Note the claims that a pod owns or consumes. The caller holds the lock."""
        for claim in self._known.related(pod):
            self._add("claim", claim)

    def _add(self, kind: str, name: Name) -> None:
        self._due[kind, name] = None
        self._wake.notify_all()

    def _run(self) -> None:
        while not all(watch.wait_synced(0.1) for watch in self._watches):
            if self._stopped:
                return
        while True:
            with self._wake:
                while not self._due and not self._stopped:
                    self._wake.wait()
                if self._stopped:
                    return
                due = list(self._due)
                self._due.clear()
            failed = [key for key in due if not self._sync(*key)]
            if failed:
                time.sleep(_RETRY_SECONDS)
            with self._wake:
                for key in failed:
                    self._add(*key)

    def _sync(self, kind: str, name: Name) -> bool:
        """Take the next steps for a pod or a claim. Return False if they failed and must be tried again."""
        with self._wake:
            pod = self._known.pod(name)
            claim = self._known.claim(name)
        try:
            if kind == "pod" and pod is not None:
                self._sync_pod(pod)
            elif kind == "claim" and claim is not None:
                self._sync_claim(claim)
        except (ApiError, Unreachable, _Postponed) as error:
            log.info("%s %s/%s: %s; trying again", kind, *name, error)
            return False
        return True

    def _sync_pod(self, pod: Raw) -> None:
        """Create the missing claims of a pod, and write their names to its status.

        A pod that was bound without the scheduler also becomes a consumer of its allocated claims.
        """
        meta = pod["metadata"]
        if meta.get("deletionTimestamp") or _is_done(pod):
            return
        rows = [row for row in pod["spec"].get("resourceClaims") or [] if row.get("resourceClaimTemplateName")]
        known = claim_names(pod)
        found = {row["name"]: self._ensure_claim(pod, row, known.get(row["name"])) for row in rows}
        if any(known.get(key) != value for key, value in found.items()):
            statuses = [{"name": key, "resourceClaimName": value} for key, value in found.items()]
            body = {"metadata": {"uid": meta["uid"]}, "status": {"resourceClaimStatuses": statuses}}
            self._api.patch(f"{_path('pods', name_of(pod))}/status", body, _STRATEGIC_PATCH)
        if pod["spec"].get("nodeName"):
            for claim_name in {**known, **found}.values():
                self._reserve(pod, claim_name)

    def _ensure_claim(self, pod: Raw, row: Raw, known: str | None) -> str:
        """Return the name of the claim for an entry of the pod's `resourceClaims`, and create it if it is missing."""
        meta = pod["metadata"]
        key = (meta["uid"], row["name"])
        with self._wake:
            claims = [self._known.claim(name) for name in sorted(self._known.related(pod))]
        for claim in filter(None, claims):
            name = claim["metadata"]["name"]
            marked = (claim["metadata"].get("annotations") or {}).get(CLAIM_ANNOTATION) == row["name"]
            owner = owning_pod(claim)
            if owner is not None and owner[1] == meta["uid"] and (name == known or marked):
                self._created.pop(key, None)
                return str(name)
        if key in self._created and self._exists(meta["namespace"], self._created[key]):
            return self._created[key]
        self._created[key] = self._create_claim(pod, row)
        return self._created[key]

    def _exists(self, namespace: str, name: str) -> bool:
        try:
            self._api.get(_path("resourceclaims", (namespace, name)))
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _create_claim(self, pod: Raw, row: Raw) -> str:
        meta = pod["metadata"]
        template_name = row["resourceClaimTemplateName"]
        try:
            template = self._api.get(_path("resourceclaimtemplates", (meta["namespace"], template_name)))
        except ApiError as error:
            if error.status != 404:
                raise
            reason = f'resource claim template "{template_name}": {error.message}'
            reference = pod_reference(meta["namespace"], meta["name"], meta["uid"])
            self._events.warn(reference, "FailedResourceClaimCreation", f"PodResourceClaim {row['name']}: {reason}")
            raise _Postponed(reason) from error
        given = template["spec"].get("metadata") or {}
        owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        body = {
            "metadata": {
                "generateName": f"{meta['name']}-{row['name']}-",
                "labels": given.get("labels") or {},
                "annotations": {**(given.get("annotations") or {}), CLAIM_ANNOTATION: row["name"]},
                "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            },
            "spec": template["spec"]["spec"],
        }
        made = self._api.create(f"{_ROOT}/namespaces/{meta['namespace']}/resourceclaims", body)
        return str(made["metadata"]["name"])

    def _reserve(self, pod: Raw, claim_name: str) -> None:
        meta = pod["metadata"]
        with self._wake:
            claim = self._known.claim((meta["namespace"], claim_name))
        status = (claim or {}).get("status") or {}
        consumers = status.get("reservedFor") or []
        is_consumer = any(row["uid"] == meta["uid"] for row in consumers)
        if claim is None or not status.get("allocation") or is_consumer or len(consumers) >= _MOST_CONSUMERS:
            return
        row = {"resource": "pods", "name": meta["name"], "uid": meta["uid"]}
        self._write_status(claim, {**status, "reservedFor": [*consumers, row]})

    def _sync_claim(self, claim: Raw) -> None:
        """Remove what a claim no longer needs: consumers, the allocation, the finalizer and the claim itself."""
        status = claim.get("status") or {}
        consumers = status.get("reservedFor") or []
        valid = [row for row in consumers if self._is_valid(claim["metadata"]["namespace"], row)]
        protected = FINALIZER in (claim["metadata"].get("finalizers") or [])
        deleting = "deletionTimestamp" in claim["metadata"]
        if len(valid) < len(consumers):
            left = {**status, "reservedFor": valid}
            if not valid and protected:
                left.pop("allocation", None)
            claim = self._write_status(claim, left)
            if protected and "allocation" not in (claim.get("status") or {}):
                claim = self._unprotect(claim)
        elif protected and deleting and not valid:
            if status.get("allocation"):
                claim = self._write_status(claim, {k: v for k, v in status.items() if k != "allocation"})
            claim = self._unprotect(claim)
        if not valid and not deleting:
            self._delete_unused(claim)

    def _delete_unused(self, claim: Raw) -> None:
        """Delete a claim that was created for a pod which has ended or was replaced."""
        owner = owning_pod(claim)
        if owner is None:
            return
        namespace, name = name_of(claim)
        with self._wake:
            pod = self._known.pod((namespace, owner[0]))
        if pod is not None and (pod["metadata"]["uid"] != owner[1] or _is_done(pod)):
            try:
                self._api.delete(_path("resourceclaims", (namespace, name)))
            except ApiError as error:
                if error.status != 404:
                    raise

    def _is_valid(self, namespace: str, row: Raw) -> bool:
        """Return whether a consumer of a claim may still use it. Consumers other than pods stay."""
        if row.get("apiGroup") or row["resource"] != "pods":
            return True
        with self._wake:
            pod = self._known.pod((namespace, row["name"]))
        if pod is None or pod["metadata"]["uid"] != row["uid"]:
            # The watch may lag behind, so the API server decides.
            try:
                pod = self._api.get(_path("pods", (namespace, row["name"])))
            except ApiError as error:
                if error.status != 404:
                    raise
                return False
        return bool(pod["metadata"]["uid"] == row["uid"]) and not _is_done(pod)

    def _write_status(self, claim: Raw, status: Raw) -> Raw:
        return self._api.replace(f"{_path('resourceclaims', name_of(claim))}/status", {**claim, "status": status})

    def _unprotect(self, claim: Raw) -> Raw:
        kept = [name for name in claim["metadata"].get("finalizers") or [] if name != FINALIZER]
        body = {**claim, "metadata": {**claim["metadata"], "finalizers": kept}}
        return self._api.replace(_path("resourceclaims", name_of(claim)), body)


def _is_done(pod: Raw) -> bool:
    """Return whether no container of a pod runs, and none will."""
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return True
    return "deletionTimestamp" in pod["metadata"] and not pod["spec"].get("nodeName")


def _path(plural: str, name: Name) -> str:
    root = "/api/v1" if plural == "pods" else _ROOT
    return f"{root}/namespaces/{name[0]}/{plural}/{name[1]}"
