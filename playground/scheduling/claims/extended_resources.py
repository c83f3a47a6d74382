"""Turns extended resources, such as `nvidia.com/gpu: 1`, into requests of a ResourceClaim.

A DeviceClass can name an extended resource. A pod that requests the resource then gets devices of the class on the
nodes that do not offer the resource themselves, by one claim that the scheduling loop creates for the pod.

Source: pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go in Kubernetes.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.model.compute_resources import allocatable, requests_of
from mgpu.model.quantities import parse_quantity

Raw = Mapping[str, Any]
ANNOTATION = "resource.kubernetes.io/extended-resource-claim"


@dataclass(frozen=True, slots=True)
class ExtendedClaim:
    """A claim that the loop will create for a pod on a node.

    Attributes:
        claim: The claim, with a name and a UID that it has only in the loop.
        mappings: Which request serves which resource of which container, as in the pod's status.
    """

    claim: dict[str, Any]
    mappings: tuple[dict[str, str], ...]


def delegated(pod: Raw, node: Raw, classes: Mapping[str, str]) -> list[str]:
    """Return the resources of a pod that come from claims on a node, sorted.

    Args:
        classes: The names of the DeviceClasses by the extended resources that they stand for.
    """
    wanted = requests_of(pod)
    named = sorted(name for name in wanted if wanted[name] and name in classes)
    there = allocatable(node) if named else {}
    return [name for name in named if not there.get(name)]


def extended_claim(pod: Raw, resources: Sequence[str], classes: Mapping[str, str]) -> ExtendedClaim:
    """Return the claim for these resources of a pod."""
    requests: list[dict[str, Any]] = []
    mappings: list[dict[str, str]] = []
    for name in resources:
        added, mapped = _requests(pod, name, classes[name])
        requests += added
        mappings += mapped
    meta = pod["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"], "controller": True}
    claim = {
        "metadata": {
            "namespace": meta["namespace"],
            "generateName": f"{meta['name']}-extended-resources-",
            "name": "<extended-resources>",
            "uid": str(uuid.uuid4()),
            "ownerReferences": [owner],
            "annotations": {ANNOTATION: "true"},
        },
        "spec": {"devices": {"requests": sorted(requests, key=lambda row: str(row["name"]))}},
    }
    return ExtendedClaim(claim, tuple(mappings))


def _requests(pod: Raw, resource: str, device_class: str) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the requests for one resource, and the mappings of its containers.

    An init container that ends before the others start uses the devices of the later containers. If it needs more,
    the largest of these additional requests serves all such init containers.
    """
    init = list(pod["spec"].get("initContainers") or ())
    containers = [*init, *pod["spec"]["containers"]]
    is_short = [i < len(init) and c.get("restartPolicy") != "Always" for i, c in enumerate(containers)]
    lasting: dict[int, dict[str, Any]] = {}
    mappings: list[dict[str, str]] = []
    for i, container in enumerate(containers):
        if not is_short[i] and (count := _amount(container, resource)):
            lasting[i] = _request(i, container, resource, device_class, count)
            mappings.append(_mapping(container, resource, lasting[i]["name"]))
    largest: dict[str, Any] | None = None
    short: list[tuple[Raw, list[str]]] = []
    for i, container in enumerate(containers):
        count = _amount(container, resource)
        if not is_short[i] or not count:
            continue
        used = []
        for row in (lasting[at] for at in sorted(lasting) if at >= i):
            if count <= 0:
                break
            used.append(row["name"])
            count -= row["exactly"]["count"]
        if count > 0:
            own = _request(i, container, resource, device_class, count)
            used.append("")  # stands for the largest additional request
            if largest is None or largest["exactly"]["count"] < count:
                largest = own
        short.append((container, used))
    extra = [] if largest is None else [largest]
    for container, names in short:
        mappings += [_mapping(container, resource, name or extra[0]["name"]) for name in names]
    return [*extra, *lasting.values()], mappings


def _amount(container: Raw, resource: str) -> int:
    requests = (container.get("resources") or {}).get("requests") or {}
    return int(parse_quantity(requests[resource])) if resource in requests else 0


def _request(i: int, container: Raw, resource: str, device_class: str, count: int) -> dict[str, Any]:
    at = sorted((container.get("resources") or {}).get("requests") or {}).index(resource)
    exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}
    return {"name": f"container-{i}-request-{at}", "exactly": exactly}


def _mapping(container: Raw, resource: str, request: str) -> dict[str, str]:
    return {"containerName": container["name"], "resourceName": resource, "requestName": request}
