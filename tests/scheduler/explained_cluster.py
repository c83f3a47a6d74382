"""A small cluster for `mgpu explain`, and what is in it: objects of an API server."""

from typing import Any

from mgpu.kube import Api
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import read_node
from playground.installation import manifests
from tests.builders import GIB, cards, container, mtgpupod, node, pod, share

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PODS, MTGPUPODS = "/api/v1/namespaces/default/pods", "/apis/lsalab.nthu/v1/namespaces/default/mtgpupods"
RECORD = {"vke.volcengine.com/gpu-index-container-c": "1", "vke.volcengine.com/assumed": "true"}
SAYS = "0/3 nodes are available: 1 node(s) had untolerated taint {team: b}, 2 insufficient GPU."
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": SAYS}
CREATE_ERROR = {"waiting": {"reason": "CreateContainerConfigError", "message": "no cards have been decided"}}


def fill(api: Api) -> None:
    """Nodes n1 and n2 with two cards each, of which n1's card 1 is taken by `holder`; n3 has none."""
    for manifest in manifests():
        if manifest["kind"] == "CustomResourceDefinition":
            api.create(DEFINITIONS, manifest)
    add_node(api, "n1", 2)
    add_node(api, "n2", 2)
    api.create("/api/v1/nodes", node("n3"))
    add(api, share("holder", 60, 60 * 1024, node="n1", annotations=RECORD))
    add(api, share("too-large", 50, 90 * 1024), [UNSCHEDULABLE])
    add(api, pod("two", container("a", 100), container("b", 80, 1024)), [UNSCHEDULABLE])
    add(api, share("waits", 50, 1024), [UNSCHEDULABLE])
    add(api, share("unseen", 50, 1024))
    add(api, pod("malformed", container("c", 120)))
    add(api, pod("plain", {"name": "c", "image": "x"}))
    late = share("late", 10, 1024, node="n2")
    late["status"]["containerStatuses"] = [{"name": "c", "state": CREATE_ERROR, "ready": False}]
    add(api, late)
    add(api, share("lost", 10, 1024, node="n2", annotations={"vke.volcengine.com/gpu-index-container-c": "x"}))
    add(api, share("done", 10, 1024, node="n1", annotations=RECORD, phase="Succeeded"))
    gated = share("gated", 50, 1024)
    gated["spec"]["schedulingGates"] = [{"name": "team/quota"}]
    add(api, gated)
    named = mtgpupod("notebook", request="0.4", memory=3 * GIB, node="n2")
    wants = {"type": "Bound", "status": "False", "reason": "NoFreeCard", "message": "every card is in use"}
    made = api.create(MTGPUPODS, named)
    api.replace(f"{MTGPUPODS}/notebook/status", {**made, "status": {"phase": "Pending", "conditions": [wants]}})


def add_node(api: Api, name: str, count: int) -> None:
    raw = node(name)
    made = api.create("/api/v1/nodes", raw)
    device = write_device(read_node(raw), made["metadata"]["uid"], cards(count, node=name))
    api.create(f"/apis/{DEVICE_API}/devices", device)


def add(api: Api, raw: dict[str, Any], conditions: list[dict[str, str]] | None = None) -> None:
    made = api.create(PODS, raw)
    status = {**raw["status"], "conditions": conditions or []}
    api.replace(f"{PODS}/{raw['metadata']['name']}/status", {**made, "status": status})
