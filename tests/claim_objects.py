"""Builds ResourceClaims and DeviceClasses as decoded JSON."""

from typing import Any

from mgpu.model.resource_claims import API, DRIVER

Raw = dict[str, Any]
CLASS: Raw = {
    "apiVersion": API,
    "kind": "DeviceClass",
    "metadata": {"name": "mgpu"},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
}


def claim(
    name: str,
    *cards: int,
    node: str = "n1",
    cores: int = 30,
    memory: str = "8Gi",
    of_pod: str = "",
    device_class: str = "mgpu",
    driver: str = DRIVER,
    annotations: dict[str, str] | None = None,
) -> Raw:
    """Return a claim for a share of each of the cards. Without cards it requests one and has no allocation.

    Args:
        of_pod: the UID of the pod for which the claim was created from a template.
    """
    amounts = {"cores": str(cores), "memory": memory}
    exactly = {"deviceClassName": device_class, "count": len(cards) or 1, "capacity": {"requests": amounts}}
    meta: Raw = {"name": name, "namespace": "ml", "uid": f"claim-{name}", "annotations": annotations or {}}
    if of_pod:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": of_pod, "controller": True}
        meta["ownerReferences"] = [owner]
    results = [_result(driver, node, card, amounts) for card in cards]
    return {
        "apiVersion": API,
        "kind": "ResourceClaim",
        "metadata": meta,
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        "status": {"allocation": {"devices": {"results": results}}} if results else {},
    }


def _result(driver: str, node: str, card: int, amounts: dict[str, str]) -> Raw:
    place = {"driver": driver, "pool": node, "device": f"card-{card}", "shareID": f"00000000-0000-4000-8000-{card:012}"}
    return {"request": "gpu", **place, "consumedCapacity": amounts}
