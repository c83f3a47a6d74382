"""Defines the requests of a pod that mgpu has converted into a ResourceClaim, and the template of that claim.

The webhook takes the resources of a vocabulary out of a new pod, and refers to a ResourceClaimTemplate instead
(`webhook.pod_conversion`). It writes into the annotation `mgpu.io/converted` what the template contains, and the
resources that it has taken out. A controller of the scheduler creates the template from the annotation
(`scheduler.claims.templates`). Pods with equal requests use the same template, because its name is derived from its
content, which does not depend on the namespace.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mgpu.model.errors import BadObject, Problem, raise_if_any
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS, PREFIX
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, parse_quantity, quantity_of_bytes
from mgpu.model.raw_objects import annotation_path, is_integer, parse_json_object, table_at
from mgpu.model.resource_claims import API, CORES, DRIVER, MAX_RESULTS, MEMORY

CONVERTED = PREFIX + "converted"
"""The annotation of a converted pod. Only mgpu's webhook writes it."""
CLAIM = "mgpu"
"""The name of the claim in `spec.resourceClaims` of a converted pod."""
DEVICE_CLASS = "mgpu"
"""The DeviceClass of all requests of a generated template (manifests/components/dra/device-class.yaml)."""
GENERATED = PREFIX + "generated"
"""The label of generated templates. Its value is `true`."""
TEMPLATES = f"/apis/{API}/resourceclaimtemplates"

_NAME_PREFIX = "mgpu-"
_DIGITS = 20
"""The hexadecimal digits in a template's name. The controller reports a template with another content, so a collision,
which somebody would have to search for, cannot give a pod the share of another one."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_DISTINCT = f"{DRIVER}/uuid"
_PATH = annotation_path(CONVERTED)
_KEYS = frozenset(key.removeprefix(PREFIX) for key in CONSTRAINT_ANNOTATIONS)

Resources = Mapping[str, Mapping[str, str]]
"""The amounts of a container by kind (`requests`, `limits`) and by the name of the resource."""


@dataclass(frozen=True, slots=True)
class ConvertedRequest:
    """One request of a generated template.

    Attributes:
        name: the name of the container for which the request was made.
        cards: the number of different cards.
        cores: the compute of each card in percent; None for whole cards.
        memory: the memory of each card in bytes; None for whole cards.
    """

    name: str
    cards: int = 1
    cores: int | None = None
    memory: int | None = None

    @property
    def whole(self) -> bool:
        return self.cores is None


@dataclass(frozen=True, slots=True)
class ConvertedRequests:
    """The value of the annotation `mgpu.io/converted`.

    Attributes:
        constraints: the constraints on cards, as `Constraints.texts` returns them.
        original: the resources that were taken out of the pod, by container. The template does not depend on them.
            With them, a pod that is created again from an exported pod can be converted again, under the rules that
            apply then.
    """

    requests: tuple[ConvertedRequest, ...]
    constraints: Mapping[str, str] = field(default_factory=dict, hash=False)
    original: Mapping[str, Resources] = field(default_factory=dict, hash=False)

    @property
    def template_name(self) -> str:
        digest = hashlib.sha256(_to_json({"requests": self._rows(), "constraints": dict(self.constraints)}).encode())
        return _NAME_PREFIX + digest.hexdigest()[:_DIGITS]

    def to_annotation(self) -> str:
        content = {"requests": self._rows(), "constraints": dict(self.constraints), "original": dict(self.original)}
        return _to_json({key: value for key, value in content.items() if value})

    def _rows(self) -> list[dict[str, Any]]:
        rows = ({"name": r.name, "cards": r.cards, CORES: r.cores, MEMORY: r.memory} for r in self.requests)
        return [{key: value for key, value in row.items() if value is not None} for row in rows]


def _to_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def read_converted(text: str) -> ConvertedRequests:
    """Return the content of the annotation `mgpu.io/converted`. Raises BadObject if it is not in the right form."""
    content = parse_json_object(text, _PATH)
    rows = content.get("requests")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_RESULTS:
        raise BadObject([Problem(_PATH, f"must have 1 to {MAX_RESULTS} requests")])
    requests = tuple(_read_request(row, i) for i, row in enumerate(rows))
    problems = []
    if len({request.name for request in requests}) < len(requests):
        problems.append(Problem(_PATH, "has two requests with the same name"))
    if sum(request.cards for request in requests) > MAX_RESULTS:
        problems.append(Problem(_PATH, f"requests more than {MAX_RESULTS} cards"))
    constraints = content.get("constraints", {})
    if not _is_text_table(constraints) or not constraints.keys() <= _KEYS:
        problems.append(Problem(_PATH, "has constraints that are none"))
    original = content.get("original", {})
    if not isinstance(original, dict) or not all(map(_is_resources, original.values())):
        problems.append(Problem(_PATH, "has original resources in another form than a container has"))
    raise_if_any(problems)
    return ConvertedRequests(requests, constraints, original)


def _read_request(row: object, position: int) -> ConvertedRequest:
    table = table_at(row)
    name = table.get("name")
    cards = table.get("cards")
    cores = table.get(CORES)
    memory = table.get(MEMORY)
    is_named = isinstance(name, str) and _NAME.fullmatch(name)
    has_amounts = is_integer(cores, 0, 100) and is_integer(memory, 0, MAX_QUANTITY)
    is_whole = cores is None and memory is None
    if not is_named or not is_integer(cards, 1, MAX_RESULTS) or not (has_amounts or is_whole):
        raise BadObject([Problem(_PATH, f"request {position} must have a name, a number of cards and amounts")])
    return ConvertedRequest(str(name), cards, cores, memory)


def _is_resources(value: object) -> bool:
    is_table = isinstance(value, dict) and value.keys() <= {"requests", "limits"}
    return is_table and all(map(_is_text_table, table_at(value).values()))


def _is_text_table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def template_path(namespace: str, name: str = "") -> str:
    """Return the path of a ResourceClaimTemplate in the API, or that of all templates of a namespace."""
    path = f"/apis/{API}/namespaces/{quote(namespace, safe='')}/resourceclaimtemplates"
    return f"{path}/{quote(name, safe='')}" if name else path


def pod_claim(converted: ConvertedRequests) -> dict[str, str]:
    """Return the entry of `spec.resourceClaims` of a converted pod."""
    return {"name": CLAIM, "resourceClaimTemplateName": converted.template_name}


def claim_template(converted: ConvertedRequests, namespace: str) -> dict[str, Any]:
    """Return the ResourceClaimTemplate of a converted pod.

    It contains no selectors, no configuration, no administrative access and no other class, whatever the annotation
    contains. The label and the annotations say what has created it, and from what.
    """
    return {
        "apiVersion": API,
        "kind": "ResourceClaimTemplate",
        "metadata": {
            "name": converted.template_name,
            "namespace": namespace,
            "labels": {GENERATED: "true"},
        },
        "spec": {
            "metadata": {"annotations": {PREFIX + key: text for key, text in sorted(converted.constraints.items())}},
            "spec": {"devices": _devices(converted.requests)},
        },
    }


def _devices(requests: Sequence[ConvertedRequest]) -> dict[str, Any]:
    """Return the requests, and the constraints that make requests for several cards get different cards.

    kube-scheduler chooses different devices for one request by itself. The constraint is for allocations that others
    have written: without it, mgpu may put two results of a request on one card (`engine.claim_placement`).
    """
    devices: dict[str, Any] = {"requests": [{"name": r.name, "exactly": _exactly(r)} for r in requests]}
    several = [{"requests": [r.name], "distinctAttribute": _DISTINCT} for r in requests if r.cards > 1]
    return {**devices, "constraints": several} if several else devices


def _exactly(request: ConvertedRequest) -> dict[str, Any]:
    # Defaults are written out, so that the object that the API server returns can be compared with this one.
    exactly = {"deviceClassName": DEVICE_CLASS, "allocationMode": "ExactCount", "count": request.cards}
    if request.whole:
        return exactly
    amounts = {CORES: str(request.cores), MEMORY: quantity_of_bytes(request.memory or 0)}
    return {**exactly, "capacity": {"requests": amounts}}


def is_same_template(raw: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether claims from the template `raw`, read from the API server, equal those from the `wanted` one."""
    annotations = (table_at(one, "spec", "metadata", "annotations") for one in (raw, wanted))
    specs = (_comparable(table_at(one, "spec", "spec")) for one in (raw, wanted))
    return next(annotations) == next(annotations) and next(specs) == next(specs)


def _comparable(value: object, *, is_capacity: bool = False) -> object:
    """Return a value in which equal quantities of capacities have the same form."""
    if isinstance(value, dict):
        return {k: _comparable(v, is_capacity=is_capacity or k == "capacity") for k, v in value.items()}
    if isinstance(value, list):
        return [_comparable(one, is_capacity=is_capacity) for one in value]
    if is_capacity:
        try:
            return parse_quantity(value)
        except QuantityError:
            return value
    return value


def is_generated(raw: Mapping[str, Any]) -> bool:
    """Return whether a template has the label of generated templates, and a name that only mgpu gives."""
    meta = table_at(raw, "metadata")
    return is_generated_name(str(meta.get("name", ""))) and table_at(meta, "labels").get(GENERATED) == "true"


def is_generated_name(name: str) -> bool:
    """Return whether a name has the form of those of generated templates."""
    digits = name.removeprefix(_NAME_PREFIX)
    return name != digits and len(digits) == _DIGITS and set(digits) <= set("0123456789abcdef")


def template_references(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the ResourceClaimTemplates that a pod refers to."""
    rows = table_at(raw, "spec").get("resourceClaims")
    for row in rows if isinstance(rows, list) else ():
        name = table_at(row).get("resourceClaimTemplateName")
        if isinstance(name, str) and name:
            yield name


def has_claim(raw: Mapping[str, Any]) -> bool:
    """Return whether the claim of a converted pod was created, according to the pod's status."""
    rows = table_at(raw, "status").get("resourceClaimStatuses")
    return any(table_at(row).get("name") == CLAIM for row in (rows if isinstance(rows, list) else ()))
