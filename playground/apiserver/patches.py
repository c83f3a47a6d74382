"""The four patches: RFC 6902, RFC 7396, Kubernetes' strategic merge, and apply (as a strategic merge)."""

import copy
from typing import Any

import jsonpatch
import jsonpointer
import orjson
import yaml

from playground.apiserver.errors import ApiError, bad_request
from playground.apiserver.storage import Object
from playground.apiserver.strategic import strategic_merge

JSON, MERGE = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
_REFUSED = "the server rejected our request due to an error in our request"
_MAX_OPERATIONS = 10_000


def merge(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def json_patch(target: Object, operations: list[Object]) -> Object:
    """RFC 6902, but as the real server has it: `replace` of a member that is not there adds it.

    Raises jsonpatch.JsonPatchException or JsonPointerException when it does not apply.
    """
    result: Object = copy.deepcopy(target)
    for operation in jsonpatch.JsonPatch(operations).patch:
        if operation["op"] == "replace" and isinstance(_parent(result, operation["path"]), dict):
            operation = {**operation, "op": "add"}
        result = jsonpatch.JsonPatch([operation]).apply(result, in_place=True)
    return result


def _parent(target: Object, path: str) -> Any:
    return jsonpointer.resolve_pointer(target, path.rpartition("/")[0], None)


def parse(content_type: str, body: bytes, *, custom: bool) -> tuple[str, Any]:
    """(media type, patch) of a request. Raises 400 for text that is no such patch, 415 for other media types."""
    media = content_type.partition(";")[0].strip()
    accepted = [JSON, MERGE, APPLY] if custom else [JSON, MERGE, STRATEGIC, APPLY]
    if media not in accepted and media != "application/apply-patch+cbor":
        raise ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
    try:
        patch = yaml.safe_load(body) if media == APPLY else orjson.loads(body)
    except (orjson.JSONDecodeError, yaml.YAMLError) as problem:
        raise bad_request(f"error decoding patch: {problem}") from problem
    if not isinstance(patch, list if media == JSON else dict):
        raise bad_request("error decoding patch: json: cannot unmarshal into a patch of this kind")
    if media == JSON and len(patch) > _MAX_OPERATIONS:
        raise ApiError(
            413, "RequestEntityTooLarge", f"The allowed maximum operations in a JSON patch is {_MAX_OPERATIONS}"
        )
    return media, patch


def apply(media: str, patch: Any, target: Object, *, custom: bool) -> Object:
    """The patched copy of `target`. Raises 422 when the patch does not fit the object."""
    if media == MERGE or (media in (STRATEGIC, APPLY) and custom):
        return dict(merge(target, patch))
    if media in (STRATEGIC, APPLY):
        return strategic_merge(target, patch)
    try:
        return json_patch(target, patch)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as problem:
        raise ApiError(422, "Invalid", _REFUSED, {}) from problem
