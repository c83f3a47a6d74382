"""The Node and its Device object as the API server has them, kept current by watches.

`deviceplugin.main` creates one `NodeObjects` for each agent. `inventory.reporter` and `partitioning.node_status` read
the objects and write them, and other clients may write them too. The partition worker, the agent's registrations and
the card source read the Node. The answer to a write of the agent is stored at once, so that the agent does not repeat
the write before the watch delivers it.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import DEVICE_API
from mgpu.model.node_slices import LABEL
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.model.slice_names import MIG, MPS

log = logging.getLogger(__name__)

Raw = dict[str, Any]
DEVICES = f"/apis/{DEVICE_API}/devices"
PUBLISHED_ANNOTATION = "mgpu.io/status-resources"
"""The annotation of the Node that lists the resources which the agent has written into the Node's status. The agent
changes and removes only these."""
_NODE_SECONDS = 5.0


class NodeObjects:
    """The watched Node and Device of this agent. Thread-safe.

    Args:
        api: The client of the API server.
        node: The name of the node, and of its Device.

    Attributes:
        name: The name of the node.
        on_node_change: Functions that are called on the watch's thread when the Node has changed. Add them before
            `start`.
        on_device_change: Functions that are called in the same way when the Device has changed.
    """

    def __init__(self, api: Api, node: str) -> None:
        self.name = node
        self.on_node_change: list[Callable[[], None]] = []
        self.on_device_change: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._node: Raw | None = None
        self._device: Raw | None = None
        self._node_listed = threading.Event()
        query = {"fieldSelector": f"metadata.name={node}"}
        self._nodes = Reflector(api, "/api/v1/nodes", self._take_node, lambda _: self._take_node(None), query)
        self._devices = Reflector(api, DEVICES, self._take_device, lambda _: self._take_device(None), query)

    def start(self) -> None:
        """Start the watches."""
        self._nodes.start()
        self._devices.start()

    def stop(self) -> None:
        """End the watches, if they were started."""
        self._nodes.stop()
        self._devices.stop()

    @property
    def node(self) -> Raw | None:
        """The Node; None if it has not been listed yet, or does not exist."""
        with self._lock:
            return self._node

    @property
    def device(self) -> Raw | None:
        """The Device; None if it does not exist, or while `devices_synced` is false."""
        with self._lock:
            return self._device

    @property
    def devices_synced(self) -> bool:
        """Whether Devices have been listed. This fails if their CRD is not installed."""
        return self._devices.synced

    def capacity(self, resource: str) -> int | None:
        """Return the Node's capacity of the resource, which may be 0, or None if the Node has not been listed yet."""
        node = self.node
        return None if node is None else amount_of(((node.get("status") or {}).get("capacity") or {}).get(resource, 0))

    def not_drained_reason(self, resource: str, *, pods_synced: bool, held: int) -> str | None:
        """Return why the resource cannot be offered as device ids yet, or None if it can.

        A resource that was published in node status can be offered as ids only when no pod holds it. Ids may stand for
        larger units than the status (GiB instead of MiB), so there could be fewer ids than running pods hold.

        Args:
            resource: The name of the resource.
            pods_synced: Whether all pods of the node have been listed.
            held: How much of the resource the pods hold; ignored unless `pods_synced` is true.
        """
        node = self.node
        if node is None:
            return f"node {self.name} has not been listed yet"
        if resource not in published_resources(node):
            return None
        if not pods_synced:
            return "the pods of this node have not been listed yet"
        return f"pods still hold {resource} as it was published before" if held else None

    def partition_mode(self) -> str:
        """Return the partitioning mode in the Node's label: MIG, MPS or "". Wait a few seconds for the Node first."""
        self._node_listed.wait(_NODE_SECONDS)
        mode = (((self.node or {}).get("metadata") or {}).get("labels") or {}).get(LABEL)
        return mode if mode in (MIG, MPS) else ""

    def wrote_node(self, before: Raw, after: Raw) -> None:
        """Store the answer to a write of the Node by this agent, unless the watch has delivered a newer object.

        Args:
            before: The object that `node` returned before the write.
            after: The object in the API server's answer.
        """
        with self._lock:
            if self._node is before:
                self._node = after

    def wrote_device(self, before: Raw | None, after: Raw) -> None:
        """Store the answer to a write of the Device, in the same way as `wrote_node`."""
        with self._lock:
            if self._device is before:
                self._device = after

    def _take_node(self, raw: Raw | None) -> None:
        with self._lock:
            if raw is None or self._node is None or not _is_older(raw, self._node):
                self._node = raw
        self._node_listed.set()
        for listener in self.on_node_change:
            listener()

    def _take_device(self, raw: Raw | None) -> None:
        with self._lock:
            self._device = raw
        for listener in self.on_device_change:
            listener()


def amount_of(value: object) -> int | None:
    """Return an amount in node status as an integer; None if it is missing or not an integer."""
    try:
        return None if value is None else whole_number(value)
    except QuantityError:
        return None


def published_resources(node: Raw) -> frozenset[str]:
    """Return the resources that the agent has published in this Node's status."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(PUBLISHED_ANNOTATION, "")
    return frozenset(text.split(",")) - {""}


def _is_older(delivered: Raw, stored: Raw) -> bool:
    """Return whether the object that the watch delivers is older than the stored answer to a write of this agent.

    According to the API conventions a resourceVersion is opaque. With etcd it is a number; other values are not
    compared.
    """
    metas = delivered["metadata"], stored["metadata"]
    if metas[0].get("uid") != metas[1].get("uid"):
        return False
    versions = [str(meta.get("resourceVersion", "")) for meta in metas]
    return all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])
