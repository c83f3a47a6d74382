"""gpushare pods for tests, as their users and the peer's own scheduler write them."""

from typing import Any

from mgpu.dialects import gpushare
from mgpu.dialects.protocol import SHARE
from tests.builders import pod

Raw = dict[str, Any]


def container(name: str = "c", units: object = 1, **more: Any) -> Raw:
    """Return a container that requests memory in limits, as in the example of the seed."""
    return {"name": name, "image": "cuda", "resources": {"limits": {gpushare.MEMORY: str(units)}}, **more}


def asking(name: str = "p", units: object = 1, **more: Any) -> Raw:
    """Return a pod with what admission adds if memory is counted in MiB."""
    own = container("c", units)
    own["resources"]["limits"][SHARE] = "1"
    return pod(name, own, **more)


def allocated(name: str, units: object, node: str, card: object, **more: Any) -> Raw:
    """Return a pod that gpushare's scheduler has bound, with one card and no record per container."""
    record = {
        gpushare.INDEX: str(card),
        gpushare.OF_CARD: "80",
        gpushare.OF_POD: str(units),
        gpushare.ASSUME_TIME: "1632984663000000000",
        gpushare.ASSIGNED: "true",
    }
    return asking(name, units, node=node, annotations=record, **more)
