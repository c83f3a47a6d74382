"""Reads the ResourceClaims, ResourceClaimTemplates and DeviceClasses in the input of `mgpu simulate`.

An API server would deny malformed objects, so they are checked here: first the types and names of the fields, as
kubectl does, and then the rules of the API server (`playground.apiserver.claim_rules`). `world` calls
`read_claim_objects`, and `pipeline` calls `pod_problems`.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.claim_object import read_claim
from mgpu.model.errors import BadObject, Problem
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import API, CORES, DRIVER, MEMORY, Claim
from mgpu.settings import CARD_POLICIES
from playground.apiserver import claim_rules
from playground.apiserver.api_errors import Cause
from playground.apiserver.pod_claim_rules import validate_claims
from playground.simulate.documents import Document, Raw

CLAIM, TEMPLATE, CLASS = KINDS = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")
WHOLE_CARDS = "nvidia.com/gpu"
"""The extended resource that claims serve on nodes with the label `mgpu.io/whole-cards: dra`."""
_OURS = f'device.driver == "{DRIVER}"'
_INSTANCES = f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].?type.orValue("") == "mig"'
_ANY: Any = object()
"""In a shape, a value that only the rules of the API server check, or that has no effect."""
_EXACTLY = {
    "deviceClassName": str,
    "selectors": [{"cel": {"expression": str}}],
    "allocationMode": str,
    "count": int,
    "adminAccess": bool,
    "tolerations": [_ANY],
    "capacity": {"requests": dict},
}
_REQUEST = {"name": str, "exactly": _EXACTLY, "firstAvailable": [{"name": str, **_EXACTLY}]}
_CONSTRAINT = {"requests": [str], "matchAttribute": str, "distinctAttribute": str}
_CLAIM_SPEC = {"devices": {"requests": [_REQUEST], "constraints": [_CONSTRAINT], "config": [_ANY]}}
_CLASS_SPEC = {"selectors": [{"cel": {"expression": str}}], "config": [_ANY], "extendedResourceName": str}
_POD_CLAIM = {"name": str, "resourceClaimName": str, "resourceClaimTemplateName": str}
_KIND_NAMES = {str: "a string", int: "an integer", bool: "a boolean", dict: "an object"}


@dataclass(slots=True)
class ClaimObjects:
    """The claims of the input.

    Attributes:
        claims: The ResourceClaims by `namespace/name`.
        templates: The claims that the ResourceClaimTemplates describe, without a name, by `namespace/name`.
        classes: The CEL expressions of the DeviceClasses, by the name of the class.
        extended: The names of the DeviceClasses by the extended resources that they stand for.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    templates: dict[str, Claim] = field(default_factory=dict)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    extended: dict[str, str] = field(default_factory=dict)


def read_claim_objects(documents: Iterable[Document], nodes: Collection[str]) -> ClaimObjects:
    """Return the claims, templates and classes among the documents.

    If there is no DeviceClass, those of mgpu's manifests are assumed. Raises BadObject with the first problem.

    Args:
        nodes: The names of the nodes.
    """
    found = ClaimObjects()
    listed = [document for document in documents if document.kind in KINDS]
    for document in (document for document in listed if document.kind == CLASS):
        _add_class(found, document)
    if not found.classes:
        found.classes = {"mgpu": (_OURS,), "mgpu-whole": (_OURS,), "mgpu-mig": (_INSTANCES,)}
        found.extended = {WHOLE_CARDS: "mgpu-whole"}
    for document in listed:
        if document.kind == CLAIM:
            _add_claim(found, document, nodes)
        elif document.kind == TEMPLATE:
            _add_template(found, document)
    return found


def _add_class(found: ClaimObjects, document: Document) -> None:
    raw = _checked(document, {"spec": _CLASS_SPEC}, claim_rules.class_defaults, claim_rules.validate_class)
    _check_unique(document, document.name, found.classes)
    rows = raw["spec"].get("selectors") or ()
    found.classes[document.name] = tuple(row["cel"]["expression"] for row in rows)
    if resource := raw["spec"].get("extendedResourceName"):
        found.extended[resource] = min(document.name, found.extended.get(resource, document.name))


def _add_claim(found: ClaimObjects, document: Document, nodes: Collection[str]) -> None:
    raw = _checked(document, {"spec": _CLAIM_SPEC}, claim_rules.defaults, claim_rules.validate)
    meta = raw["metadata"]
    key = f"{meta.setdefault('namespace', 'default')}/{document.name}"
    meta.setdefault("uid", f"{CLAIM}/{key}")
    _check_unique(document, key, found.claims)
    claim = _read(document, raw, "")
    for result in claim.results:
        if result.pool not in nodes:
            field = f"status.allocation.devices.results[{result.position}].pool"
            raise document.error_at(field, f"no node is named {result.pool!r}")
    _check_capacities(found, document, raw["spec"], "spec")
    found.claims[key] = claim


def _add_template(found: ClaimObjects, document: Document) -> None:
    shape = {"spec": {"metadata": dict, "spec": _CLAIM_SPEC}}
    raw = _checked(document, shape, claim_rules.template_defaults, claim_rules.validate_template)
    namespace = raw["metadata"].get("namespace") or "default"
    key = f"{namespace}/{document.name}"
    _check_unique(document, key, found.templates)
    meta = {**table_at(raw, "spec", "metadata"), "namespace": namespace}
    claim = _read(document, {"metadata": meta, "spec": raw["spec"]["spec"]}, "spec.")
    _check_capacities(found, document, raw["spec"]["spec"], "spec.spec")
    found.templates[key] = claim


def _checked(
    document: Document,
    shape: Mapping[str, Any],
    set_defaults: Callable[[Raw], None],
    validate: Callable[[Raw], Iterable[Cause]],
) -> Raw:
    """Return a copy of the object with its defaults. Raises BadObject with its first problem."""
    raw = copy.deepcopy(document.raw)
    if raw.get("apiVersion", API) != API:
        raise document.error_at("apiVersion", f"must be {API}, not {raw['apiVersion']!r}")
    if not document.name:
        raise document.error_at("metadata.name", "is missing")
    for problem in _wrong_types({key: raw[key] for key in shape if key in raw}, shape, ""):
        raise document.error_at(problem.field, problem.message)
    set_defaults(raw)
    for cause in validate(raw):
        raise document.error_at(cause.field, cause.message)
    return raw


def _read(document: Document, raw: Raw, prefix: str) -> Claim:
    try:
        return read_claim(raw, CARD_POLICIES)
    except BadObject as error:
        first = error.problems[0]
        raise document.error_at(f"{prefix}{first.field}", first.message) from error


def _check_unique(document: Document, key: str, known: Collection[str]) -> None:
    if key in known:
        raise document.error_at("metadata.name", f"a {document.kind} named {key} exists already")


def _check_capacities(found: ClaimObjects, document: Document, spec: Raw, path: str) -> None:
    """Raise BadObject if a request for cards of mgpu names a capacity that they do not have. It would never fit."""
    for i, request in enumerate(spec["devices"].get("requests") or ()):
        rows = [("exactly", request.get("exactly") or {})]
        rows += [(f"firstAvailable[{j}]", row) for j, row in enumerate(request.get("firstAvailable") or ())]
        for key, row in rows:
            is_ours = any(DRIVER in expression for expression in found.classes.get(row.get("deviceClassName", ""), ()))
            strange = sorted({*table_at(row, "capacity", "requests")} - {CORES, MEMORY})
            if is_ours and strange:
                where = f"{path}.devices.requests[{i}].{key}.capacity.requests[{strange[0]}]"
                raise document.error_at(where, f"a card of mgpu has only the capacities {CORES} and {MEMORY}")


def _wrong_types(value: object, shape: Any, path: str) -> Iterator[Problem]:
    """Yield the fields whose type is wrong and those that do not exist. A null is like a missing field."""
    if shape is _ANY or value is None:
        return
    if isinstance(shape, list):
        if not isinstance(value, list):
            yield Problem(path, "must be a list")
            return
        for i, item in enumerate(value):
            if item is None and shape[0] is not _ANY:
                yield Problem(f"{path}[{i}]", "must not be empty")
            yield from _wrong_types(item, shape[0], f"{path}[{i}]")
    elif isinstance(shape, Mapping):
        if not isinstance(value, dict):
            yield Problem(path, "must be an object")
            return
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            if key in shape:
                yield from _wrong_types(item, shape[key], inner)
            else:
                yield Problem(inner, f"unknown field; the fields are {', '.join(shape)}")
    elif not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
        yield Problem(path, f"must be {_KIND_NAMES[shape]}, not {value!r}")


def pod_problems(raw: Raw) -> list[Problem]:
    """Return why the API server would deny the claims of a pod and the references of its containers to them."""
    spec = raw.get("spec") or {}
    problems = list(_wrong_types(spec.get("resourceClaims"), [_POD_CLAIM], "spec.resourceClaims"))
    for part in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(part) or ()):
            rows = (container.get("resources") or {}).get("claims")
            problems += _wrong_types(rows, [{"name": str, "request": str}], f"spec.{part}[{i}].resources.claims")
    return problems or [Problem(cause.field, cause.message) for cause in validate_claims(spec)]
