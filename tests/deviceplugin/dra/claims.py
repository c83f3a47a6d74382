"""Builders of ResourceClaims and of pods that use them, as the API has them."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.model.resource_claims import DRIVER

Json = dict[str, Any]


def uid_of(text: str) -> str:
    """Return a UID that depends on nothing but the text."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, text))


def request(name: str = "gpu", cores: int | None = 30, memory: str | None = "8Gi", count: int = 1) -> Json:
    """A request of a claim. Without both amounts it is for whole cards."""
    wanted = {key: str(value) for key, value in (("cores", cores), ("memory", memory)) if value is not None}
    exactly: Json = {"deviceClassName": "mgpu", "allocationMode": "ExactCount", "count": count}
    return {"name": name, "exactly": exactly | ({"capacity": {"requests": wanted}} if wanted else {})}


def result(card: int, of: Json, node: str = "n1", share: str = "") -> Json:
    """An allocation result: a request of a claim gets a share of a card."""
    wanted = of["exactly"].get("capacity", {}).get("requests", {"cores": "100", "memory": "80Gi"})
    return {
        "request": of["name"],
        "driver": DRIVER,
        "pool": node,
        "device": f"card-{card}",
        "shareID": share or uid_of(f"{of['name']}-{card}"),
        "consumedCapacity": dict(wanted),
    }


def allocation(results: Sequence[Json], node: str = "n1") -> Json:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    selector = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"devices": {"results": list(results)}, "nodeSelector": selector}


def claim(
    name: str = "a",
    *requests: Json,
    cards: Sequence[int] = (0,),
    pods: Sequence[str] = ("p",),
    owner: str | None = None,
    annotations: Mapping[str, str] | None = None,
    node: str = "n1",
) -> Json:
    """An allocated claim. The i-th card is that of the i-th request.

    Args:
        pods: The names of the pods that may use it.
        owner: The pod for which it was made from a template; None if there is none.
    """
    asked = requests or (request(),)
    results = [result(card, of, node) for of, card in zip(asked, cards, strict=True)]
    meta: Json = {"namespace": "default", "name": name, "uid": uid_of(name), "annotations": dict(annotations or {})}
    if owner is not None:
        meta["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": f"uid-{owner}", "controller": True}
        ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": meta,
        "spec": {"devices": {"requests": list(asked)}},
        "status": {
            "allocation": allocation(results, node),
            "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
        },
    }


def claim_pod(name: str = "p", *containers: Json, claims: Sequence[str] = ("a",), node: str = "n1") -> Json:
    """A pod that uses claims, each by its own name. By default its only container references the first claim.

    Args:
        node: The node to which it is bound; "" if it is not bound.
    """
    raw: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "default", "name": name, "uid": f"uid-{name}"},
        "spec": {
            "resourceClaims": [{"name": one, "resourceClaimName": one} for one in claims],
            "containers": list(containers or (using("c", claims[0]),)),
        },
        "status": {"phase": "Pending"},
    }
    if node:
        raw["spec"]["nodeName"] = node
    return raw


def using(name: str, *references: str) -> Json:
    """A container that references claims, or with `a/gpu` one request of a claim."""
    rows = []
    for reference in references:
        of, _, asked = reference.partition("/")
        rows.append({"name": of} | ({"request": asked} if asked else {}))
    return {"name": name, "image": "cuda", "resources": {"claims": rows}}
