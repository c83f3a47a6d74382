"""What hangs on other resources or is answered without being stored: evictions, logs, reviews of oneself."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import orjson

from playground.apiserver.attributes import User
from playground.apiserver.deletions import Deleter
from playground.apiserver.errors import bad_request, success
from playground.apiserver.objects import now, read_body
from playground.apiserver.reads import existing
from playground.apiserver.routes import Call
from playground.apiserver.storage import Item, Object, Storage

LogSource = Callable[[str, str, str], str]


def _marked(pod: Object) -> Object:
    status = pod.get("status") or {}
    conditions = [c for c in status.get("conditions") or [] if c["type"] != "DisruptionTarget"]
    mark = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "lastProbeTime": None}
    mark |= {"message": "Eviction API: evicting", "lastTransitionTime": now()}
    return {**pod, "status": {**status, "conditions": [*conditions, mark]}}


async def evict(storage: Storage, deleter: Deleter, call: Call) -> Object:
    """POST pods/<name>/eviction: a condition that says so, and a deletion with the Eviction's options."""
    body = read_body(call) or {}
    options = {"kind": "DeleteOptions", "apiVersion": "v1"} | (body.get("deleteOptions") or {})
    pod = existing(storage, call)
    if not call.dry_run and "deletionTimestamp" not in pod.obj["metadata"]:
        storage.replace("pods", pod, _marked(pod.obj))
    path = dataclasses.replace(call.path, subresource="")
    await deleter.delete(
        dataclasses.replace(call, path=path, body=orjson.dumps(options), content_type="application/json")
    )
    return success(code=201)


def _container(pod: Item, wanted: str) -> str:
    name = pod.key[1]
    spec = pod.obj["spec"]
    names = [c["name"] for field in ("initContainers", "containers") for c in spec.get(field) or []]
    apps = [c["name"] for c in spec["containers"]]
    if not wanted and len(apps) == 1:
        return str(apps[0])
    if not wanted:
        raise bad_request(f"a container name must be specified for pod {name}, choose one of: [{' '.join(apps)}]")
    if wanted not in names:
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    return wanted


async def log(storage: Storage, source: LogSource | None, call: Call) -> str | None:
    """The text of a container's log, from the node; `tailLines` is honoured. None before there is a node."""
    pod = existing(storage, call)
    container = _container(pod, call.query.get("container", ""))
    if not pod.obj["spec"].get("nodeName"):
        return None
    if source is None:
        return ""
    try:
        text = await asyncio.to_thread(source, *pod.key, container)
    except LookupError as problem:
        why = f'container "{container}" in pod "{pod.key[1]}" is waiting to start: ContainerCreating'
        raise bad_request(why) from problem
    if "tailLines" in call.query:
        lines = text.splitlines(keepends=True)
        text = "".join(lines[len(lines) - min(len(lines), call.number("tailLines")) :])
    return text


def self_review(call: Call, plural: str, may: Callable[[User, Mapping[str, str]], bool]) -> Object | None:
    """Answers `kubectl auth can-i` (paths that are no resources: yes) and `kubectl auth whoami`."""
    if plural == "selfsubjectaccessreviews":
        review = dict(read_body(call))
        wanted = (review.get("spec") or {}).get("resourceAttributes")
        return review | {"status": {"allowed": wanted is None or may(call.user, wanted)}}
    if plural == "selfsubjectreviews":
        kind: Object = {"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1"}
        return kind | {"metadata": {"creationTimestamp": now()}, "status": {"userInfo": call.user.as_info()}}
    return None
