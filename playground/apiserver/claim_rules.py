"""The API server's rules for ResourceClaims, ResourceClaimTemplates and DeviceClasses: defaults and validation.

`claim_status_rules` has the rules for the status of a claim. Source: pkg/apis/resource in Kubernetes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from playground.apiserver.api_errors import Cause, forbidden_field, invalid_value, required, too_long, unsupported
from playground.apiserver.device_expressions import MOST_CHARACTERS, expression_problem
from playground.apiserver.device_names import driver_name, full_attribute_name, rows, toleration
from playground.apiserver.kinds import Kind
from playground.apiserver.names import dns_label, qualified_name, subdomain
from playground.apiserver.storage import Object

_MOST_REQUESTS = 32
_MOST_ALTERNATIVES = 8
_MOST_SELECTORS = 32
MOST_CONFIGURATIONS = 32
ADMIN_LABEL = "resource.kubernetes.io/admin-access"
_MODES = ("All", "ExactCount")
_ONE_REQUEST = "exactly one of `exactly` or `firstAvailable` is required"
_ONE_CONSTRAINT = 'exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set'
_NAME_RULE = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"


def request_names(spec: Object) -> Mapping[str, frozenset[str]]:
    """Return the names of the requests of a claim, each with the names of its alternatives."""
    requests = (spec.get("devices") or {}).get("requests") or []
    return {
        r.get("name") or "": frozenset(a.get("name") or "" for a in r.get("firstAvailable") or []) for r in requests
    }


def request_reference(value: str, field: str, names: Mapping[str, frozenset[str]]) -> Iterator[Cause]:
    """Yield the problems of a name that must be one of `request_names`, such as `gpu` or `gpu/small`."""
    request, slash, alternative = value.partition("/")
    if "/" in alternative:
        yield invalid_value(field, value, _NAME_RULE)
        return
    for part in (request, alternative) if slash else (request,):
        yield from dns_label(part, field)
    if request not in names or (slash and alternative not in names[request]):
        yield invalid_value(field, value, _NAME_RULE)


def tolerations_default(row: Object) -> None:
    """Set the default operator of the tolerations of a request or of a result, in place."""
    for one in row.get("tolerations") or []:
        one.setdefault("operator", "Equal")


def _spec_defaults(spec: Object) -> None:
    devices = spec["devices"] = spec.get("devices") or {}
    for request in devices.get("requests") or []:
        exactly = request.get("exactly")
        for row in [*([exactly] if exactly is not None else []), *(request.get("firstAvailable") or [])]:
            row["allocationMode"] = row.get("allocationMode") or "ExactCount"
            if row["allocationMode"] == "ExactCount":
                row["count"] = row.get("count") or 1
            tolerations_default(row)


def defaults(claim: Object) -> None:
    """Set the defaults of a ResourceClaim in place. Empty lists and null in the status are removed."""
    claim["spec"] = claim.get("spec") or {}
    _spec_defaults(claim["spec"])
    status = claim["status"] = {k: v for k, v in (claim.get("status") or {}).items() if v not in (None, [])}
    if (allocation := status.get("allocation")) is not None:
        for field in [k for k, v in allocation.items() if v is None]:
            del allocation[field]
        devices = allocation["devices"] = allocation.get("devices") or {}
        for result in devices.get("results") or []:
            tolerations_default(result)
    for row in status.get("devices") or []:
        row.setdefault("conditions", None)  # the only optional list of the API group that is written as null


def prepare(claim: Object) -> None:
    """Set the status of a new ResourceClaim, which is empty whatever the client sends."""
    claim["status"] = {}


def template_defaults(template: Object) -> None:
    """Set the defaults of a ResourceClaimTemplate in place."""
    spec = template["spec"] = template.get("spec") or {}
    spec["metadata"] = {k: v for k, v in (spec.get("metadata") or {}).items() if v is not None}
    spec["spec"] = spec.get("spec") or {}
    _spec_defaults(spec["spec"])


def class_defaults(device_class: Object) -> None:
    """Set the defaults of a DeviceClass in place."""
    device_class["spec"] = device_class.get("spec") or {}


def validate(claim: Object) -> Iterator[Cause]:
    """Yield the problems of a ResourceClaim."""
    yield from _check_devices(claim["spec"], "spec")


def validate_update(new: Object, old: Object) -> Iterator[Cause]:
    """Yield the problem of an update of a ResourceClaim that changes the spec."""
    if new["spec"] != old["spec"]:
        yield invalid_value("spec", new["spec"], "field is immutable")


def validate_template(template: Object) -> Iterator[Cause]:
    """Yield the problems of a ResourceClaimTemplate."""
    yield from _check_devices(template["spec"]["spec"], "spec.spec")


def validate_template_update(new: Object, old: Object) -> Iterator[Cause]:
    """Yield the problem of an update of a ResourceClaimTemplate that changes the spec."""
    yield from validate_update(new, old)


def validate_class(device_class: Object) -> Iterator[Cause]:
    """Yield the problems of a DeviceClass."""
    spec = device_class["spec"]
    yield from rows(spec.get("selectors") or [], _MOST_SELECTORS, "spec.selectors", _check_selector)
    yield from rows(spec.get("config") or [], MOST_CONFIGURATIONS, "spec.config", check_configuration)
    name = spec.get("extendedResourceName")
    if name is not None and not _is_extended(name):
        yield invalid_value("spec.extendedResourceName", name, "must be a valid extended resource name")


def admin_problems(kind: Kind, obj: Object, labels: Mapping[str, str]) -> Iterator[Cause]:
    """Yield the problem of a new claim or template that requests adminAccess in a namespace that does not allow it.

    Args:
        labels: The labels of the namespace.
    """
    specs = {
        "resourceclaims.resource.k8s.io": ("spec", obj.get("spec")),
        "resourceclaimtemplates.resource.k8s.io": ("spec.spec", (obj.get("spec") or {}).get("spec")),
    }
    path, spec = specs.get(kind.resource, ("", None))
    if spec is None or labels.get(ADMIN_LABEL) == "true":
        return
    for i, request in enumerate((spec.get("devices") or {}).get("requests") or []):
        if (request.get("exactly") or {}).get("adminAccess"):
            rule = f"admin access to devices requires the `{ADMIN_LABEL}: true` label on the containing namespace"
            yield forbidden_field(f"{path}.devices.requests[{i}].exactly.adminAccess", rule)
            return


def _is_extended(name: str) -> bool:
    """Return whether a name may be that of an extended resource."""
    domain, slash, _ = name.rpartition("/")
    native = domain == "kubernetes.io" or domain.endswith(".kubernetes.io") or name.startswith("requests.")
    return bool(slash) and not native and not qualified_name(f"requests.{name}", "")


def _check_devices(spec: Object, path: str) -> Iterator[Cause]:
    devices = spec["devices"]
    path = f"{path}.devices"
    names = request_names(spec)

    def reference(value: str, field: str) -> Iterable[Cause]:
        return request_reference(value, field, names)

    def constraint(row: Object, field: str) -> Iterable[Cause]:
        return _check_constraint(row, field, reference)

    def configuration(row: Object, field: str) -> Iterator[Cause]:
        yield from rows(row.get("requests") or [], _MOST_REQUESTS, f"{field}.requests", reference, str)
        yield from check_configuration(row, field)

    requests = devices.get("requests") or []
    yield from rows(requests, _MOST_REQUESTS, f"{path}.requests", _check_request, lambda r: r.get("name") or "")
    yield from rows(devices.get("constraints") or [], 32, f"{path}.constraints", constraint)
    yield from rows(devices.get("config") or [], MOST_CONFIGURATIONS, f"{path}.config", configuration)


def _check_request(request: Object, field: str) -> Iterator[Cause]:
    yield from dns_label(request.get("name") or "", f"{field}.name")
    alternatives = request.get("firstAvailable") or []
    exactly = request.get("exactly")
    if alternatives and exactly is not None:
        yield invalid_value(field, None, f"{_ONE_REQUEST}, but multiple fields are set")
    elif alternatives:
        where = f"{field}.firstAvailable"
        yield from rows(alternatives, _MOST_ALTERNATIVES, where, _check_alternative, lambda r: r.get("name") or "")
    elif exactly is not None:
        yield from _check_exactly(exactly, f"{field}.exactly")
    else:
        yield required(field, _ONE_REQUEST)


def _check_alternative(row: Object, field: str) -> Iterator[Cause]:
    yield from dns_label(row.get("name") or "", f"{field}.name")
    yield from _check_exactly(row, field)


def _check_exactly(row: Object, field: str) -> Iterator[Cause]:
    name = row.get("deviceClassName") or ""
    yield from subdomain(name, f"{field}.deviceClassName") if name else [required(f"{field}.deviceClassName")]
    yield from rows(row.get("selectors") or [], _MOST_SELECTORS, f"{field}.selectors", _check_selector)
    mode = row["allocationMode"]
    count = row.get("count") or 0
    if mode not in _MODES:
        yield unsupported(f"{field}.allocationMode", mode, _MODES)
    elif mode == "All" and count:
        yield invalid_value(f"{field}.count", count, "must not be specified when allocationMode is 'All'")
    elif mode == "ExactCount" and count <= 0:
        yield invalid_value(f"{field}.count", count, "must be greater than zero")
    yield from rows(row.get("tolerations") or [], 16, f"{field}.tolerations", toleration)


def _check_selector(row: Object, field: str) -> Iterator[Cause]:
    if row.get("cel") is None:
        yield required(f"{field}.cel")
        return
    expression = row["cel"].get("expression") or ""
    field = f"{field}.cel.expression"
    if len(expression) > MOST_CHARACTERS:
        yield too_long(field, MOST_CHARACTERS)
    elif (problem := expression_problem(expression)) is not None:
        yield invalid_value(field, expression, problem)


def _check_constraint(row: Object, field: str, reference: Any) -> Iterator[Cause]:
    yield from rows(row.get("requests") or [], _MOST_REQUESTS, f"{field}.requests", reference, str)
    key = next((k for k in ("matchAttribute", "distinctAttribute") if row.get(k) is not None), None)
    if key is None:
        yield required(field, _ONE_CONSTRAINT)
    else:
        yield from full_attribute_name(row[key], f"{field}.{key}")


def check_configuration(row: Object, field: str) -> Iterator[Cause]:
    """Yield the problems of the configuration for a driver in a class, a claim or an allocation."""
    opaque = row.get("opaque")
    if opaque is None:
        yield required(f"{field}.opaque")
        return
    yield from driver_name(opaque.get("driver") or "", f"{field}.opaque.driver")
    if opaque.get("parameters") is None:
        yield required(f"{field}.opaque.parameters")
    elif not isinstance(opaque["parameters"], dict):
        yield invalid_value(f"{field}.opaque.parameters", "<value omitted>", "must be a valid JSON object")
