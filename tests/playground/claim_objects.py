"""ResourceSlices, DeviceClasses and ResourceClaims for the tests of the control plane."""

from typing import Any

from mgpu.kube import Api
from mgpu.model.resource_claims import DRIVER
from tests.playground.fake_cluster import Json

ROOT = "/apis/resource.k8s.io/v1"
CLASSES = f"{ROOT}/deviceclasses"
SLICES = f"{ROOT}/resourceslices"
CLAIMS = f"{ROOT}/namespaces/default/resourceclaims"
TEMPLATES = f"{ROOT}/namespaces/default/resourceclaimtemplates"


def card(index: int, *, cores: int = 100, memory: str = "80Gi", **more: Any) -> Json:
    """A device that several claims may share, as mgpu's agent publishes it."""
    return {
        "name": f"card-{index}",
        "allowMultipleAllocations": True,
        "attributes": {"index": {"int": index}, "model": {"string": "H200"}},
        "capacity": {
            "cores": {
                "value": str(cores),
                "requestPolicy": {"default": "100", "validRange": {"min": "1", "step": "1"}},
            },
            "memory": {
                "value": memory,
                "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}},
            },
        },
        **more,
    }


def device(name: str, **attributes: Any) -> Json:
    """A device that only one claim may have. The attributes are texts, numbers or Booleans."""
    kinds = {str: "string", bool: "bool", int: "int"}
    return {"name": name, "attributes": {key: {kinds[type(value)]: value} for key, value in attributes.items()}}


def device_slice(node: str = "n1", *devices: Json, name: str = "", pool: Json | None = None, **spec: Any) -> Json:
    """A ResourceSlice of a node, of which the pool has no other."""
    whole = {"name": node, "generation": 1, "resourceSliceCount": 1} | (pool or {})
    body = {"driver": DRIVER, "nodeName": node, "pool": whole, "devices": list(devices), **spec}
    body = {key: value for key, value in body.items() if value is not None}
    return {"metadata": {"name": name or f"{node}-{DRIVER}"}, "spec": body}


def device_class(name: str = "mgpu", expression: str = f'device.driver == "{DRIVER}"', **spec: Any) -> Json:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}], **spec}}


def request(name: str = "gpu", **exactly: Any) -> Json:
    """A request for devices of the class `mgpu`."""
    return {"name": name, "exactly": {"deviceClassName": "mgpu", **exactly}}


def share(cores: int | str, memory: str, **more: Any) -> Json:
    """A request for a part of a card."""
    return request(capacity={"requests": {"cores": str(cores), "memory": memory}}, **more)


def claim_spec(*requests: Json, **devices: Any) -> Json:
    return {"devices": {"requests": list(requests), **devices}}


def claim(name: str, *requests: Json, **devices: Any) -> Json:
    return {"metadata": {"name": name}, "spec": claim_spec(*requests, **devices)}


def template(name: str, *requests: Json, **devices: Any) -> Json:
    return {"metadata": {"name": name}, "spec": {"spec": claim_spec(*requests, **devices)}}


def result(index: int = 0, *, node: str = "n1", share_id: str = "", **more: Any) -> Json:
    """An allocation result for the request `gpu`."""
    base = {"request": "gpu", "driver": DRIVER, "pool": node, "device": f"card-{index}", **more}
    return base | ({"shareID": share_id} if share_id else {})


def results_of(api: Api, name: str) -> list[Json]:
    """Return the allocation results of a claim, or an empty list if it is not allocated."""
    allocation = (api.get(f"{CLAIMS}/{name}").get("status") or {}).get("allocation") or {}
    return list((allocation.get("devices") or {}).get("results") or [])
