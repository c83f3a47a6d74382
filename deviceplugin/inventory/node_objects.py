"""The Node and its Device object as the API server has them, kept current by watches.

The agent writes both (`deviceplugin.inventory.reporter`, `deviceplugin.partitioning.node_status`), and so may anybody
else. An own write is taken over at once, so that the writer does not repeat it before the watch delivers it.
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
"""An annotation of the Node: the resources in its status that the agent has written, and may change and remove."""
_NODE_SECONDS = 5.0


class NodeObjects:
    """Thread-safe. Listeners are called on the watches' threads; add them before `start`.

    Args:
        node: the node's name, which is also the name of its Device.

    Attributes:
        on_node_change: listeners that are called when the Node has changed.
        on_device_change: listeners that are called when the Device has changed.
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
        """Begin to watch."""
        self._nodes.start()
        self._devices.start()

    def stop(self) -> None:
        """End the watches. Nothing if they were not started."""
        self._nodes.stop()
        self._devices.stop()

    @property
    def node(self) -> Raw | None:
        """The Node; None if it is not known yet, or gone."""
        with self._lock:
            return self._node

    @property
    def device(self) -> Raw | None:
        """The Device; None if there is none. Meaningful once `devices_synced`."""
        with self._lock:
            return self._device

    @property
    def devices_synced(self) -> bool:
        """Whether Devices have been listed, which fails without their CRD."""
        return self._devices.synced

    def capacity(self, resource: str) -> int | None:
        """Return how much of the resource the Node has now, 0 for none; None if the Node is not known yet."""
        node = self.node
        return None if node is None else amount_of(((node.get("status") or {}).get("capacity") or {}).get(resource, 0))

    def not_drained_reason(self, resource: str, *, pods_synced: bool, held: int) -> str | None:
        """Return why a resource that was published in node status cannot be served as ids yet; None if it can.

        Its publisher changes on a drained node only. Ids may stand for larger units than the status had (GiB instead of
        MiB), so there would be fewer than running pods hold.

        Args:
            held: how much of it pods hold, if all pods are known.
        """
        node = self.node
        if node is None:
            return f"node {self.name} is not known yet"
        if resource not in published_resources(node):
            return None
        if not pods_synced:
            return "the pods of this node are not known yet"
        return f"pods hold {resource} as it was published before; it changes when they have ended" if held else None

    def partition_mode(self) -> str:
        """Return how the node's cards are partitioned by its label (MIG, MPS or ""); wait for the Node at first."""
        self._node_listed.wait(_NODE_SECONDS)
        mode = (((self.node or {}).get("metadata") or {}).get("labels") or {}).get(LABEL)
        return mode if mode in (MIG, MPS) else ""

    def wrote_node(self, before: Raw, after: Raw) -> None:
        """Take over the answer to an own write of the Node, unless the watch has delivered something newer.

        Args:
            before: the object for which the write was made, as `node` returned it.
        """
        with self._lock:
            if self._node is before:
                self._node = after

    def wrote_device(self, before: Raw | None, after: Raw) -> None:
        """Take over the answer to an own write of the Device, unless the watch has delivered something newer."""
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
    """Return an amount in node status as a number; None if it is missing or no whole number."""
    try:
        return None if value is None else whole_number(value)
    except QuantityError:
        return None


def published_resources(node: Raw) -> frozenset[str]:
    """Return the resources that the agent has published in this Node's status."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(PUBLISHED_ANNOTATION, "")
    return frozenset(text.split(",")) - {""}


def _is_older(delivered: Raw, known: Raw) -> bool:
    """Return whether the watch delivers a state from before an own write.

    resourceVersions are opaque by the API conventions; etcd-backed servers make them numbers, others are not compared.
    """
    one, other = delivered["metadata"], known["metadata"]
    versions = [str(meta.get("resourceVersion", "")) for meta in (one, other)]
    return (
        one.get("uid") == other.get("uid") and all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])
    )
