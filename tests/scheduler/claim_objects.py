"""ResourceClaims, DeviceClasses and ResourceSlices as the API has them, and how kube-scheduler writes allocations."""

import copy
from typing import Any

from mgpu.kube import ApiError
from mgpu.model.resource_claims import API, DRIVER, PREPARED, claim_path
from mgpu.model.resource_slices import slice_name
from tests.scheduler.fake import FakeApi, Replica, admitted, admitted_claims, cluster

Raw = dict[str, Any]
CLASS = "mgpu"


def request(name: str = "gpu", cores: object = None, memory: object = None, **more: Any) -> Raw:
    """A request for devices: `request(cores=30, memory="8Gi", count=2)`."""
    return {"name": name, "exactly": exactly(cores, memory, **more)}


def exactly(cores: object = None, memory: object = None, **more: Any) -> Raw:
    amounts = {key: str(value) for key, value in (("cores", cores), ("memory", memory)) if value is not None}
    capacity = {"capacity": {"requests": amounts}} if amounts else {}
    return {"deviceClassName": CLASS, **capacity, **more}


def claim(
    name: str = "c",
    *requests: Raw,
    constraints: tuple[Raw, ...] = (),
    annotations: dict[str, str] | None = None,
    uid: str = "",
    namespace: str = "default",
    created: str = "2026-01-01T00:00:00Z",
) -> Raw:
    """A claim without allocation. Without requests it has one for 30 cores and 8 GiB."""
    devices: Raw = {"requests": list(requests) or [request(cores=30, memory="8Gi")]}
    if constraints:
        devices["constraints"] = list(constraints)
    meta = {"namespace": namespace, "name": name, "uid": uid or f"uid-{name}", "creationTimestamp": created}
    return {
        "apiVersion": API,
        "kind": "ResourceClaim",
        "metadata": {**meta, "annotations": annotations or {}},
        "spec": {"devices": devices},
    }


def result(device: str = "card-0", request: str = "gpu", node: str = "n1", share: str = "", **consumed: str) -> Raw:
    """An allocation result of mgpu's driver: `result("card-1", cores="30", memory="8Gi")`."""
    row: Raw = {"request": request, "driver": DRIVER, "pool": node, "device": device}
    if share:
        row["shareID"] = share
    if consumed:
        row["consumedCapacity"] = dict(consumed)
    return row


def share(device: str = "card-0", **more: Any) -> Raw:
    """The result for the default request of `claim`."""
    return result(device, **{"cores": "30", "memory": "8Gi", "share": f"share-{device}", **more})


def allocated(raw: Raw, *results: Raw, pods: tuple[str, ...] = ("p",)) -> Raw:
    """The claim with an allocation, and reserved for pods."""
    new = copy.deepcopy(raw)
    new["status"] = {
        "allocation": {"devices": {"results": list(copy.deepcopy(results))}},
        "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
    }
    return new


def prepared(raw: Raw) -> Raw:
    """The claim with the condition that its devices were delivered."""
    new = copy.deepcopy(raw)
    new["status"]["devices"] = [
        {
            **{key: row[key] for key in ("driver", "pool", "device", "shareID") if key in row},
            "conditions": [{"type": PREPARED, "status": "True", "reason": "Delivered"}],
        }
        for row in new["status"]["allocation"]["devices"]["results"]
    ]
    return new


def device_class(name: str = CLASS, *expressions: str) -> Raw:
    return {
        "apiVersion": API,
        "kind": "DeviceClass",
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"selectors": [{"cel": {"expression": text}} for text in expressions]},
    }


def resource_slice(node: str = "n1") -> Raw:
    return {"apiVersion": API, "kind": "ResourceSlice", "metadata": {"name": slice_name(node), "uid": f"slice-{node}"}}


def waiting_pod(name: str = "p", *claims: str, **status: Any) -> Raw:
    """A pod with claims for which kube-scheduler has found no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "default", "name": name, "uid": f"uid-{name}", "creationTimestamp": f"at {name}"},
        "spec": {
            "containers": [{"name": "c", "image": "cuda"}],
            "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
        },
        "status": {"phase": "Pending", "conditions": [condition], **status},
    }


def allocate(api: FakeApi, name: str, *results: Raw, dry_run: bool = False, version: str | None = None) -> Raw:
    """Write an allocation as kube-scheduler does, and return the claim that the API server returns.

    version: the resourceVersion that kube-scheduler knows; by default that of the present claim.
    """
    raw = copy.deepcopy(api.claim(name))
    if version is not None:
        raw["metadata"]["resourceVersion"] = version
    return api.replace(f"{claim_path('default', name)}/status", allocated(raw, *results), dry_run=dry_run)


def denial(api: FakeApi, name: str, *results: Raw) -> ApiError:
    """Return the error of a write that is denied."""
    try:
        allocate(api, name, *results)
    except ApiError as error:
        return error
    raise AssertionError("not denied")


def devices(raw: Raw) -> list[str]:
    """Return the devices of a claim's allocation."""
    allocation = (raw.get("status") or {}).get("allocation") or {"devices": {"results": []}}
    return [row["device"] for row in allocation["devices"]["results"]]


def submit(api: FakeApi, *claims: Raw) -> None:
    for raw in claims:
        api.put("resourceclaims", raw)


def serving(*cards: tuple[str, int]) -> Replica:
    """Return a replica that decides for a cluster with a DeviceClass: `serving(("n1", 2))`."""
    api = cluster(*cards)
    api.put("deviceclasses", device_class())
    for node, _ in cards:
        api.put("resourceslices", resource_slice(node))
    replica = Replica(api)
    api.admit = admitted(replica)
    api.admit_claim = admitted_claims(replica)
    return replica
