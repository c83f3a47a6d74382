"""The steps that turn the body of a request into an object to store: reading, decoding, defaulting and validation.

`writes` calls `normalise`, `complete` and `create_problems` in this order for a creation, and `normalise`,
`carried_over` and `update_problems` for an update. `api_server`, `deletions` and `subresources` call single functions.
The rules for single kinds are in `strategies`.
"""

import time
import uuid
from typing import Any

import orjson
import yaml

from playground.apiserver import custom_resources, object_decoding, protobuf
from playground.apiserver.api_errors import Cause, bad_request, conflict, forbidden_field, unsupported_media_type
from playground.apiserver.calls import Call
from playground.apiserver.kinds import Kind
from playground.apiserver.names import check_metadata, generate
from playground.apiserver.storage import Object
from playground.apiserver.strategies import strategy

_PROTOBUF = "application/vnd.kubernetes.protobuf"
_BODIES = ("application/json", "application/yaml", _PROTOBUF)
# An update keeps the stored values of these fields, whatever the client sends.
_OWNED = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink")
# The API groups in which an update must name the resourceVersion that it is based on.
_NO_UNCONDITIONAL = ("admissionregistration.k8s.io", "apiextensions.k8s.io", "coordination.k8s.io", "policy")


def now() -> str:
    """Return the present time in the form of a creationTimestamp."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_body(call: Call) -> Any:
    """Return the decoded body of a request: JSON, YAML, or protobuf for the kinds that kubectl sends as protobuf.

    Raises a 400 if JSON or YAML is malformed, and a 415 for another media type or protobuf that cannot be read.
    """
    media = call.content_type.partition(";")[0].strip() or "application/json"
    if media == _PROTOBUF:
        try:
            return protobuf.read(call.body)
        except protobuf.NotReadable as problem:
            raise unsupported_media_type(_BODIES) from problem
    if media not in _BODIES[:2] and media != "application/octet-stream":
        raise unsupported_media_type(_BODIES)
    try:
        return yaml.load(call.body, yaml.CSafeLoader) if media == "application/yaml" else orjson.loads(call.body)
    except (orjson.JSONDecodeError, yaml.YAMLError) as problem:
        raise bad_request(
            f"the object provided is unrecognized (must be of type {call.path.kind.kind}): couldn't get version/kind; "
            f"json parse error: {problem}"
        ) from problem


def normalise(kind: Kind, obj: Object) -> tuple[Object, list[str]]:
    """Decode an object and set its defaults. Raises a 400 if the object cannot be decoded.

    Returns:
        The decoded object, and the paths of the fields that were dropped as unknown.
    """
    metadata: Object = obj.get("metadata") or {}
    obj = {"apiVersion": kind.api_version, "kind": kind.kind} | obj | {"metadata": metadata}
    if kind.custom:
        # A custom resource has no model. Its metadata is decoded like the metadata of a `V1Pod`, since the metadata of
        # all kinds has the same fields.
        decoded, unknown = object_decoding.decode({"metadata": metadata}, kind, "V1Pod")
        fresh, dropped = custom_resources.normalise(obj, kind.schema or {})
        fresh["metadata"] = decoded["metadata"]
        unknown += dropped
    else:
        fresh, unknown = object_decoding.decode(obj, kind)
    fresh |= {"apiVersion": kind.api_version, "kind": kind.kind}
    fresh["metadata"] = {k: v for k, v in fresh["metadata"].items() if v not in (None, {}, []) and k != "managedFields"}
    strategy(kind.resource).defaults(fresh)
    return fresh, unknown


def complete(kind: Kind, obj: Object) -> None:
    """Set the fields that the server determines for a new object, in place: name, UID, status and so on."""
    metadata = obj["metadata"]
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = generate(metadata["generateName"])
    metadata.pop("generation", None)
    metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
    if kind.generation:
        metadata["generation"] = 1
    if "status" in kind.subresources and kind.plural != "nodes":
        obj.pop("status", None)
    strategy(kind.resource).prepare(obj)


def create_problems(kind: Kind, obj: Object) -> list[Cause]:
    found = check_metadata(obj["metadata"], kind.plural)
    if kind.custom:
        return [*found, *custom_resources.problems(obj, kind.schema or {})]
    return [*found, *strategy(kind.resource).validate(obj)]


def check_preconditions(resource: str, metadata: Object, given: Object) -> None:
    """Raise a 409 if the preconditions `given` name another UID or resourceVersion than the stored object has."""
    for field, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if given.get(field) and given[field] != metadata[field]:
            mismatch = f"{word} in precondition: {given[field]}, {word} in object meta: {metadata[field]}"
            raise conflict(resource, metadata["name"], f"Precondition failed: {mismatch}")


def carried_over(kind: Kind, subresource: str, new: Object, old: Object) -> Object:
    """Return a copy of `new` that takes from `old` everything that this request may not change.

    Raises a 400 if `new` has another name than `old`, and a 409 if it has another UID or resourceVersion.

    Args:
        subresource: "status" if the request is for the status, or "" if it is for the object.
    """
    before, given = old["metadata"], new["metadata"]
    name = before["name"]
    if given.get("name", name) != name:
        raise bad_request(f"the name of the object ({given['name']}) does not match the name on the URL ({name})")
    check_preconditions(kind.resource, before, {"uid": given.get("uid")})
    if given.get("resourceVersion") not in (None, "", "0", before["resourceVersion"]):
        modified = "the object has been modified; please apply your changes to the latest version and try again"
        raise conflict(kind.resource, name, modified)
    metadata = {k: v for k, v in given.items() if k not in _OWNED} | {k: before[k] for k in _OWNED if k in before}
    metadata |= {k: before[k] for k in ("name", "namespace", "resourceVersion") if k in before}
    result = {**new, "metadata": metadata}
    if subresource == "status":
        result = _with_new_status(kind, metadata, new, old)
    elif "status" in kind.subresources:
        result.pop("status", None)
        result |= {"status": old["status"]} if "status" in old else {}
    if kind.generation and _desired(kind, result) != _desired(kind, old):
        result["metadata"] = {**result["metadata"], "generation": before.get("generation", 0) + 1}
    return result


def _with_new_status(kind: Kind, metadata: Object, new: Object, old: Object) -> Object:
    """Return a copy of `old` with the status of `new`.

    For most built-in kinds, the copy also takes its metadata from the update, except for the `ownerReferences`.
    """
    before = old["metadata"]
    rules = strategy(kind.resource)
    if kind.custom or rules.resets_metadata:
        metadata = before
    else:
        metadata = {k: v for k, v in metadata.items() if k != "ownerReferences"}
        metadata |= {k: before[k] for k in ("ownerReferences",) if k in before}
    was = old.get("status") or {}
    kept = {k: was[k] for k in rules.kept_status if k in was}
    result = {**old, "metadata": metadata, "status": kept | (new.get("status") or {})}
    rules.prepare_status(result, old)
    return result


def _desired(kind: Kind, obj: Object) -> Object:
    """Return the part of an object whose changes increase the generation."""
    left_out = ("metadata", "status") if "status" in kind.subresources or not kind.custom else ("metadata",)
    return {k: v for k, v in obj.items() if k not in left_out}


def update_problems(kind: Kind, subresource: str, new: Object, old: Object) -> list[Cause]:
    found = check_metadata(new["metadata"], kind.plural)
    before, after = (set(obj["metadata"].get("finalizers") or []) for obj in (old, new))
    if "deletionTimestamp" in old["metadata"] and (added := sorted(after - before)):
        names = ", ".join(f'"{f}"' for f in added)
        detail = "no new finalizers can be added if the object is being deleted, found new finalizers"
        found.append(forbidden_field("metadata.finalizers", f"{detail} []string{{{names}}}"))
    if kind.custom:
        found += custom_resources.problems(new, kind.schema or {})
    elif not subresource:
        found += [*strategy(kind.resource).validate(new), *strategy(kind.resource).validate_update(new, old)]
    elif subresource == "status":
        found += strategy(kind.resource).validate_status(new, old)
    return found


def needs_version(kind: Kind) -> bool:
    """Return whether an update must name the resourceVersion that it is based on."""
    return kind.custom or kind.group in _NO_UNCONDITIONAL
