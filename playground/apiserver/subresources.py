"""Serves the subresources binding, eviction and log of pods, and reviews of the user's own identity and rights.

`api_server` calls this module.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import orjson

from playground.apiserver import object_decoding
from playground.apiserver.admission_webhooks import Admission
from playground.apiserver.api_errors import Cause, bad_request, conflict, not_found, plain, required, success
from playground.apiserver.calls import Call, User
from playground.apiserver.deletions import Deleter
from playground.apiserver.objects import check_preconditions, now, read_body
from playground.apiserver.reads import existing
from playground.apiserver.storage import Item, Object, Storage

LogSource = Callable[[str, str, str], str]
"""A function of a namespace, a pod and a container that returns the container's log.

It is called on another thread, and raises LookupError if there is no log yet.
"""


class Binder:
    """Binds pods. After admission, one write sets the node, annotations, labels and the condition PodScheduled."""

    def __init__(self, storage: Storage, admission: Admission) -> None:
        self._storage = storage
        self._admission = admission

    async def bind(self, call: Call, *, legacy: bool) -> Object:
        """Handle POST of a Binding. Raises ApiError if the pod cannot be bound.

        Args:
            legacy: Whether the path is `bindings` instead of `pods/<name>/binding`. The UID and the resourceVersion of
                the Binding are then ignored.
        """
        body = read_body(call)
        if not isinstance(body, dict):
            raise bad_request("the body of the request is not a Binding")
        binding = _decode(call, body)
        given = binding["metadata"]
        if given.setdefault("namespace", call.path.namespace) != call.path.namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        name = given.get("name", "") if legacy else call.path.name
        if not name:
            raise bad_request("Name parameter required.")
        if not legacy and given.get("name") != name:
            raise bad_request("name in URL does not match name in Binding object")
        if legacy:
            given.pop("uid", None)
        resource = {"plural": "bindings"} if legacy else {"plural": "pods", "subresource": "binding"}
        attributes = call.attributes("CREATE", name, kind=("", "v1", "Binding"), **resource)
        binding = await self._admission.mutate(attributes, binding, None, lambda o: _decode(call, o))
        await self._admission.validate(attributes, binding, None)
        if problems := _binding_problems(binding):
            raise plain(500, ", ".join(map(str, problems)))
        self._write(call, name, binding, legacy=legacy)
        return success(code=201)

    def _write(self, call: Call, name: str, binding: Object, *, legacy: bool) -> None:
        item = self._storage.get("pods", call.path.namespace, name)
        if item is None:
            raise not_found("pods", name)
        if not legacy:
            check_preconditions("pods", item.obj["metadata"], binding["metadata"])
        bound = _bound(item.obj, binding)
        if not call.dry_run:
            self._storage.replace("pods", item, bound)


def _decode(call: Call, body: Object) -> Object:
    """Return the Binding in `body`. If metadata or target are missing, they are empty."""
    whole = {"apiVersion": "v1", "kind": "Binding", "metadata": {}} | body
    obj, _ = object_decoding.decode(whole, call.path.kind, "V1Binding")
    metadata = {k: v for k, v in (obj.get("metadata") or {}).items() if v is not None and k != "managedFields"}
    return obj | {"metadata": metadata, "target": obj.get("target") or {}}


def _binding_problems(binding: Object) -> list[Cause]:
    found = []
    target = binding["target"]
    if target.get("kind", "") not in ("", "Node"):
        message = f'Unsupported value: "{target["kind"]}": supported values: "Node", "<empty>"'
        found.append(Cause("target.kind", message, "FieldValueNotSupported"))
    if not target.get("name"):
        found.append(required("target.name"))
    return found


def _bound(old: Object, binding: Object) -> Object:
    """Return the pod with the fields that the Binding sets. Raises a 409 if the pod cannot be bound."""
    metadata, spec = old["metadata"], old["spec"]
    name = metadata["name"]
    if "deletionTimestamp" in metadata:
        raise conflict("pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host")
    if spec.get("nodeName"):
        raise conflict("pods/binding", name, f'pod {name} is already assigned to node "{spec["nodeName"]}"')
    if spec.get("schedulingGates"):
        raise conflict("pods/binding", name, f"pod {name} has non-empty .spec.schedulingGates")
    for field in ("annotations", "labels"):
        if added := binding["metadata"].get(field):
            metadata = {**metadata, field: {**(metadata.get(field) or {}), **added}}
    condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now()}
    spec = {**spec, "nodeName": binding["target"]["name"]}
    return {**_with_condition(old, condition), "metadata": metadata, "spec": spec}


def _with_condition(pod: Object, condition: Object) -> Object:
    """Return the pod with the condition, in place of an earlier condition of the same type."""
    status = pod.get("status") or {}
    others = [c for c in status.get("conditions") or [] if c["type"] != condition["type"]]
    return {**pod, "status": {**status, "conditions": [*others, condition]}}


async def evict(storage: Storage, deleter: Deleter, call: Call) -> Object:
    """Handle POST of an Eviction: set the condition DisruptionTarget and delete the pod with the Eviction's options.

    PodDisruptionBudgets are ignored.
    """
    eviction = read_body(call) or {}
    options = {"kind": "DeleteOptions", "apiVersion": "v1"} | (eviction.get("deleteOptions") or {})
    pod = existing(storage, call)
    if not call.dry_run and "deletionTimestamp" not in pod.obj["metadata"]:
        mark = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "lastProbeTime": None}
        mark |= {"message": "Eviction API: evicting", "lastTransitionTime": now()}
        storage.replace("pods", pod, _with_condition(pod.obj, mark))
    path = dataclasses.replace(call.path, subresource="")
    body = orjson.dumps(options)
    await deleter.delete(dataclasses.replace(call, path=path, body=body, content_type="application/json"))
    return success(code=201)


async def log(storage: Storage, source: LogSource | None, call: Call) -> str | None:
    """Return the log of a container, or None if the pod has no node yet.

    Only the query parameters `container` and `tailLines` have an effect. Raises a 400 if there is no log yet, or if
    `container` is invalid.
    """
    pod = existing(storage, call)
    container = _container(pod, call.query.get("container", ""))
    if not pod.obj["spec"].get("nodeName"):
        return None
    if source is None:
        return ""
    try:
        text = await asyncio.to_thread(source, *pod.key, container)
    except LookupError as problem:
        reason = f'container "{container}" in pod "{pod.key[1]}" is waiting to start: ContainerCreating'
        raise bad_request(reason) from problem
    if "tailLines" in call.query:
        lines = text.splitlines(keepends=True)
        text = "".join(lines[len(lines) - min(len(lines), call.number("tailLines")) :])
    return text


def _container(pod: Item, wanted: str) -> str:
    """Return the name of the container whose log is requested.

    If `wanted` is empty, return the only container of the pod. Raises a 400 if there are several, or if the pod has no
    container with this name.
    """
    name, spec = pod.key[1], pod.obj["spec"]
    apps = [c["name"] for c in spec["containers"]]
    if not wanted and len(apps) == 1:
        return str(apps[0])
    if not wanted:
        raise bad_request(f"a container name must be specified for pod {name}, choose one of: [{' '.join(apps)}]")
    if wanted not in (*apps, *(c["name"] for c in spec.get("initContainers") or [])):
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    return wanted


def self_review(call: Call, plural: str, may: Callable[[User, Mapping[str, str]], bool]) -> Object | None:
    """Return the answer to `kubectl auth can-i` or `kubectl auth whoami`, or None for any other resource.

    Args:
        may: A function that returns whether the user has the right that the `resourceAttributes` describe. A review
            without them is about a URL that names no resource, to which every user has the right.
    """
    if plural == "selfsubjectaccessreviews":
        review = dict(read_body(call))
        wanted = (review.get("spec") or {}).get("resourceAttributes")
        return review | {"status": {"allowed": wanted is None or may(call.user, wanted)}}
    if plural == "selfsubjectreviews":
        kind: Object = {"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1"}
        return kind | {"metadata": {"creationTimestamp": now()}, "status": {"userInfo": call.user.as_info()}}
    return None
