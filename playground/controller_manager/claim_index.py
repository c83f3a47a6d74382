"""The pods and the ResourceClaims that the controller of the pods' claims knows, with the relations between them."""

from collections.abc import Iterator, Mapping
from typing import Any

Raw = Mapping[str, Any]
Name = tuple[str, str]
"""The namespace and the name of a pod or a claim."""


class ClaimIndex:
    """The latest states of all pods and claims. It is not thread-safe."""

    def __init__(self) -> None:
        self._pods: dict[Name, Raw] = {}
        self._claims: dict[Name, Raw] = {}
        self._users: dict[Name, set[Name]] = {}  # the pods that name a claim
        self._related: dict[str, set[Name]] = {}  # the claims that a pod owns or consumes, by its UID

    def set_pod(self, pod: Raw) -> None:
        self.remove_pod(pod)
        name = name_of(pod)
        self._pods[name] = pod
        for claim in claim_names(pod).values():
            self._users.setdefault((name[0], claim), set()).add(name)

    def remove_pod(self, pod: Raw) -> Raw | None:
        """Remove a pod and return its last known state, if there is one."""
        name = name_of(pod)
        known = self._pods.pop(name, None)
        for claim in claim_names(known).values() if known is not None else ():
            _discard(self._users, (name[0], claim), name)
        return known

    def pod(self, name: Name) -> Raw | None:
        return self._pods.get(name)

    def set_claim(self, claim: Raw) -> None:
        self.remove_claim(claim)
        name = name_of(claim)
        self._claims[name] = claim
        for uid in _related_pods(claim):
            self._related.setdefault(uid, set()).add(name)

    def remove_claim(self, claim: Raw) -> Raw | None:
        """Remove a claim and return its last known state, if there is one."""
        name = name_of(claim)
        known = self._claims.pop(name, None)
        for uid in _related_pods(known) if known is not None else ():
            _discard(self._related, uid, name)
        return known

    def claim(self, name: Name) -> Raw | None:
        return self._claims.get(name)

    def users(self, claim: Name) -> set[Name]:
        """Return the names of the pods that name a claim, in their spec or their status."""
        return set(self._users.get(claim, ()))

    def related(self, pod: Raw) -> set[Name]:
        """Return the names of the claims that a pod owns or consumes."""
        return set(self._related.get(pod["metadata"]["uid"], ()))


def _discard(index: dict[Any, set[Name]], key: object, name: Name) -> None:
    rows = index.get(key, set())
    rows.discard(name)
    if not rows:
        index.pop(key, None)


def _related_pods(claim: Raw) -> Iterator[str]:
    for row in (claim.get("status") or {}).get("reservedFor") or ():
        yield row["uid"]
    owner = owning_pod(claim)
    if owner is not None:
        yield owner[1]


def owning_pod(claim: Raw) -> tuple[str, str] | None:
    """Return the name and the UID of the pod for which a claim was created, or None."""
    for row in claim["metadata"].get("ownerReferences") or ():
        if row.get("controller") and (row["apiVersion"], row["kind"]) == ("v1", "Pod"):
            return row["name"], row["uid"]
    return None


def claim_names(pod: Raw) -> dict[str, str]:
    """Return the names of the existing claims of a pod by their names in the pod."""
    given = {row["name"]: row.get("resourceClaimName") for row in pod["spec"].get("resourceClaims") or ()}
    statuses = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    generated = {row["name"]: row.get("resourceClaimName") for row in statuses}
    return {key: value for key, value in (given | generated).items() if value}


def name_of(obj: Raw) -> Name:
    meta = obj["metadata"]
    return meta["namespace"], meta["name"]
