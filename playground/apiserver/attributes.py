"""What a request does, as admission sees it."""

from dataclasses import dataclass, field
from typing import Any

from playground.apiserver.storage import Object


@dataclass(frozen=True)
class User:
    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""

    def as_info(self) -> Object:
        info: Object = {"username": self.name, "groups": [*self.groups, "system:authenticated"]}
        return info | ({"uid": self.uid} if self.uid else {})


@dataclass(frozen=True)
class Attributes:
    """One admission request. `kind` is that of the object, which for a subresource is not the resource's own."""

    operation: str
    group: str
    version: str
    plural: str
    subresource: str
    kind: tuple[str, str, str]
    namespace: str
    name: str
    user: User
    dry_run: bool
    namespaced: bool
    options: Object = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list, compare=False)

    def review(self, uid: str, obj: Object | None, old: Object | None) -> dict[str, Any]:
        """The AdmissionReview that a webhook gets."""
        group, version, kind = self.kind
        gvk = {"group": group, "version": version, "kind": kind}
        gvr = {"group": self.group, "version": self.version, "resource": self.plural}
        request: Object = {"uid": uid, "kind": gvk, "resource": gvr}
        if self.subresource:
            request["subResource"] = self.subresource
        request |= {"requestKind": gvk, "requestResource": gvr}
        if self.subresource:
            request["requestSubResource"] = self.subresource
        if self.name:
            request["name"] = self.name
        if self.namespace:
            request["namespace"] = self.namespace
        request |= {"operation": self.operation, "userInfo": self.user.as_info(), "object": obj, "oldObject": old}
        request |= {"dryRun": self.dry_run, "options": self.options}
        return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
