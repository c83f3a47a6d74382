"""Marks pods with ResourceClaims, so that kube-scheduler asks mgpu's extender about them.

kube-scheduler calls an extender only for pods that name one of its managed resources. The amount 0 of the resource
`mgpu.io/claims` suffices for that (`hasManagedResources` in pkg/scheduler/extender.go), while the fit of nodes, quotas
and kubelets ignore it. Without the mark everything works, but kube-scheduler chooses the node of a claim without mgpu.
So the webhook configuration has `failurePolicy: Ignore`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import MARK
from mgpu.serving.review import json_pointer


def mark(pod: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the JSON Patch that adds the resource `mgpu.io/claims` to the first container of a pod with claims."""
    spec = table_at(pod, "spec")
    containers = spec.get("containers")
    if not spec.get("resourceClaims") or not isinstance(containers, list) or not containers:
        return ()
    resources = dict(table_at(containers[0], "resources"))
    if MARK in table_at(resources, "requests"):
        return ()
    for key in ("requests", "limits"):
        resources[key] = {**table_at(resources, key), MARK: "0"}
    return ({"op": "add", "path": json_pointer("spec", "containers", 0, "resources"), "value": resources},)
