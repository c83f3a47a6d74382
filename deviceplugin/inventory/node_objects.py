"""The Node and its Device object as the API server has them, kept current by watches.

`inventory.reporter` and `partitioning.node_status` compare the objects with the state of the node, and write them if
they differ. Other modules of the agent only read them. The answer to such a write is stored at once, so that the agent
does not repeat the write before the watch delivers it.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import DEVICE_API
from mgpu.model.isolation import ISOLATION_LABEL
from mgpu.model.node_slices import LABEL, MODES
from mgpu.model.quantities import QuantityError, whole_number

log = logging.getLogger(__name__)

Raw = dict[str, Any]
DEVICES = f"/apis/{DEVICE_API}/devices"
PUBLISHED_ANNOTATION = "mgpu.io/status-resources"
"""The annotation of the Node that lists the resources which the agent has written into the Node's status. The agent
removes no other resources from the status."""
_NODE_SECONDS = 5.0


class NodeObjects:
    """The watched Node and Device of this agent. Thread-safe.

    Args:
        api: The client of the API server.
        node: The name of the node, and of its Device.

    Attributes:
        on_node_change: Functions that the thread of the watch calls when the Node has changed or has been deleted. Add
            them before `start`.
        on_device_change: The same for the Device.
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
        """The Device; None if it has not been listed yet, or does not exist."""
        with self._lock:
            return self._device

    @property
    def devices_synced(self) -> bool:
        """Whether Devices have been listed. They cannot be listed if their CRD is not installed."""
        return self._devices.synced

    def capacity(self, resource: str) -> int | None:
        """Return the Node's capacity of the resource, or 0 if the Node does not have the resource.

        Return None if there is no Node (see `node`), or if the capacity is not an integer.
        """
        node = self.node
        return None if node is None else amount_of(((node.get("status") or {}).get("capacity") or {}).get(resource, 0))

    def not_drained_reason(self, resource: str, *, pods_synced: bool, held: int) -> str | None:
        """Return why the resource cannot be offered as device ids yet, or None if it can.

        A resource that an earlier agent published in node status can be offered as ids only when no pod holds it. An id
        may stand for a larger unit (GiB instead of MiB), so there could be fewer ids than units that pods hold.

        Args:
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
        return f"pods still hold {resource} that an earlier agent published in the node status" if held else None

    def partition_mode(self) -> str:
        """Return the partitioning mode in the Node's label, or "".

        If the Node has not been listed yet, wait for it at most `_NODE_SECONDS`.
        """
        self._node_listed.wait(_NODE_SECONDS)
        mode = (((self.node or {}).get("metadata") or {}).get("labels") or {}).get(LABEL)
        return mode if mode in MODES else ""

    def isolation_label(self) -> str | None:
        """Return the value of the Node's label that overrides the setting `deviceplugin.isolation`, or None."""
        found = (((self.node or {}).get("metadata") or {}).get("labels") or {}).get(ISOLATION_LABEL)
        return None if found is None else str(found)

    def wrote_node(self, before: Raw, after: Raw) -> None:
        """Store the answer to a write of the Node by this agent, unless the stored object has changed meanwhile.

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
            self._node = _newer(raw, self._node)
        self._node_listed.set()
        for listener in self.on_node_change:
            listener()

    def _take_device(self, raw: Raw | None) -> None:
        with self._lock:
            self._device = _newer(raw, self._device)
        for listener in self.on_device_change:
            listener()


def amount_of(value: object) -> int | None:
    """Return an amount in node status as an integer; None if it is missing or not an integer."""
    try:
        return None if value is None else whole_number(value)
    except QuantityError:
        return None


def published_resources(node: Raw) -> frozenset[str]:
    """Return the resources that the agent has written into this Node's status (`PUBLISHED_ANNOTATION`)."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(PUBLISHED_ANNOTATION, "")
    return frozenset(text.split(",")) - {""}


def _newer(delivered: Raw | None, stored: Raw | None) -> Raw | None:
    """Return the object that the watch delivers, unless it is an older version of the stored one.

    The stored object may be the answer to a write, which the watch has not delivered yet. According to the API
    conventions a resourceVersion is opaque, but with etcd it is a number. Other values are not compared.
    """
    if delivered is None or stored is None or delivered["metadata"].get("uid") != stored["metadata"].get("uid"):
        return delivered
    versions = [str(raw["metadata"].get("resourceVersion", "")) for raw in (delivered, stored)]
    is_older = all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])
    return stored if is_older else delivered
