"""The API server's rules for the ResourceClaims of pods. `pod_rules` has all other rules for pods."""

from collections.abc import Iterator

from playground.apiserver.api_errors import Cause, duplicate, invalid_value, required
from playground.apiserver.device_names import required_label
from playground.apiserver.names import subdomain
from playground.apiserver.storage import Object

_SOURCES = ("resourceClaimName", "resourceClaimTemplateName")


def validate_claims(spec: Object) -> Iterator[Cause]:
    """Yield the problems of the claims of a pod, and of the references of its containers to them."""
    names: set[str] = set()
    for i, row in enumerate(spec.get("resourceClaims") or []):
        field = f"spec.resourceClaims[{i}]"
        name = row.get("name") or ""
        yield from required_label(name, f"{field}.name")
        if name in names:
            yield duplicate(f"{field}.name", name)
        names.add(name)
        given = [key for key in _SOURCES if row.get(key) is not None]
        if len(given) != 1:
            shown = "multiple" if given else "neither"
            detail = f"must specify exactly one of: `{'`, `'.join(_SOURCES)}`, but {shown} set"
            yield required(field, detail) if not given else invalid_value(field, shown, detail)
        for key in given:
            yield from subdomain(row[key], f"{field}.{key}")
    for part in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(part) or []):
            yield from _check_references(container, f"spec.{part}[{i}].resources.claims", names)


def _check_references(container: Object, field: str, names: set[str]) -> Iterator[Cause]:
    seen: set[str] = set()
    for i, row in enumerate((container.get("resources") or {}).get("claims") or []):
        place = f"{field}[{i}]"
        name = row.get("name") or ""
        request = row.get("request") or ""
        if not name:
            yield required(place)
            continue
        whole = f"{name}/{request}" if request else name
        if name in seen:
            yield duplicate(place, name)
        else:
            if request:
                yield from required_label(request, f"{place}.request")
            if whole in seen or (not request and any(other.startswith(f"{name}/") for other in seen)):
                yield duplicate(place, whole)
            seen.add(whole)
        if name not in names:
            known = f": {', '.join(sorted(names))}" if names else " which is empty"
            detail = f"must be one of the names in pod.spec.resourceClaims{known}"
            yield Cause(place, f'Not found: "{name}": {detail}', "FieldValueNotFound")


def validate_status(new: Object, _old: Object) -> Iterator[Cause]:
    """Yield the problems of `resourceClaimStatuses` and `extendedResourceClaimStatus` in the status of a pod."""
    spec = new["spec"]
    status = new.get("status") or {}
    names = {row["name"] for row in spec.get("resourceClaims") or []}
    for i, row in enumerate(status.get("resourceClaimStatuses") or []):
        field = f"status.resourceClaimStatuses[{i}]"
        name = row.get("name") or ""
        if name not in names:
            detail = "must match the name of an entry in `spec.resourceClaims`"
            yield invalid_value(f"{field}.name", name, detail)
        if row.get("resourceClaimName"):
            yield from subdomain(row["resourceClaimName"], f"{field}.name")
    extended = status.get("extendedResourceClaimStatus")
    if extended is not None:
        field = "status.extendedResourceClaimStatus"
        name = extended.get("resourceClaimName") or ""
        yield from subdomain(name, f"{field}.resourceClaimName") if name else [required(f"{field}.resourceClaimName")]
        if not extended.get("requestMappings"):
            yield required(f"{field}.requestMappings", "at least one request mapping is required")
