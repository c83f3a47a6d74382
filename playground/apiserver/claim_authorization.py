"""Checks the additional rights that a change of the status of a ResourceClaim needs (Kubernetes 1.36).

They are rights to subresources that are not served: `resourceclaims/binding` for the allocation and the consumers, and
`resourceclaims/driver` for the devices of a driver, whose name is the resource name. Without them the request is
invalid, and not forbidden. Source: pkg/registry/resource/utils.go in Kubernetes.
"""

from collections.abc import Callable, Iterator

from playground.apiserver.api_errors import Cause, forbidden_field, not_permitted
from playground.apiserver.authorization import Request
from playground.apiserver.calls import User
from playground.apiserver.storage import Object

_ASSOCIATED = "associated-node:"
_ARBITRARY = "arbitrary-node:"

Permits = Callable[[Request, User], bool]
"""Returns whether the user has the right to make the request."""


def problems(permits: Permits, user: User, request: Request, new: Object, old: Object) -> Iterator[Cause]:
    """Yield a cause for each right that the user lacks for an update of the status from `old` to `new`.

    Args:
        request: The request itself, with its verb `update` or `patch`.
    """
    status = new.get("status") or {}
    was = old.get("status") or {}
    verb = request.verb
    if any((status.get(key) or None) != (was.get(key) or None) for key in ("allocation", "reservedFor")):
        needed = Request(user.name, verb, request.group, "resourceclaims/binding")
        if not permits(needed, user):
            rule = "changing status.allocation or status.reservedFor requires"
            yield _missing("status", f'{rule} resource="resourceclaims/binding", verb="{verb}" permission', needed)
    verbs = [f"{_ARBITRARY}{verb}"]
    if user.node and user.node == _allocated_node(status) and user.name.startswith("system:serviceaccount:"):
        verbs.insert(0, f"{_ASSOCIATED}{verb}")
    for driver in sorted(_changed_drivers(status, was)):
        tried = [
            Request(user.name, v, request.group, "resourceclaims/driver", request.namespace, driver) for v in verbs
        ]
        if not any(permits(needed, user) for needed in tried):
            rule = f'resource="resourceclaims/driver", verb="[{" ".join(verbs)}]" permission'
            yield _missing("status.devices", f"changing status.devices requires {rule}", tried[0])


def _missing(field: str, rule: str, needed: Request) -> Cause:
    where = (needed.namespace, needed.name)
    return forbidden_field(
        field, f"{rule}: {not_permitted(needed.user, needed.verb, needed.group, needed.resource, *where)}"
    )


def _changed_drivers(status: Object, was: Object) -> set[str]:
    """Return the drivers of the devices that were added, removed or changed."""
    now = {_key(row): row for row in status.get("devices") or []}
    before = {_key(row): row for row in was.get("devices") or []}
    return {key[0] for key in now.keys() | before.keys() if now.get(key) != before.get(key)}


def _key(row: Object) -> tuple[str, str, str, str]:
    return row.get("driver", ""), row.get("pool", ""), row.get("device", ""), row.get("shareID") or ""


def _allocated_node(status: Object) -> str:
    """Return the name of the node to which an allocation is limited by its name, or ""."""
    terms = ((status.get("allocation") or {}).get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    if len(terms) != 1 or terms[0].get("matchExpressions"):
        return ""
    fields = terms[0].get("matchFields") or []
    if len(fields) != 1 or (fields[0].get("key"), fields[0].get("operator")) != ("metadata.name", "In"):
        return ""
    values = fields[0].get("values") or []
    return str(values[0]) if len(values) == 1 else ""
