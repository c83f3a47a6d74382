"""Nodes, and what the pods on them reserve; pods that were just sent to a node count there at once ("assumed")."""

import threading
from collections.abc import Mapping
from typing import Any

from mgpu.model.requests import add, requests_of

Raw = Mapping[str, Any]


class Cache:
    """Thread-safe; what it returns is not changed afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, Raw] = {}
        self._pods: dict[str, tuple[str, dict[str, int]]] = {}
        self._used: dict[str, dict[str, int]] = {}
        self._seen: set[str] = set()

    def set_node(self, node: Raw) -> bool:
        """Whether what scheduling looks at has changed."""
        with self._lock:
            name = node["metadata"]["name"]
            before = self._nodes.get(name)
            self._nodes[name] = node
            return before is None or _essence(before) != _essence(node)

    def remove_node(self, name: str) -> None:
        with self._lock:
            self._nodes.pop(name, None)

    def bound(self, pod: Raw) -> None:
        """The API shows the pod on its node."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            self._seen.add(uid)
            self._put(uid, pod["spec"]["nodeName"], pod)

    def assume(self, pod: Raw, node: str) -> None:
        uid = pod["metadata"]["uid"]
        with self._lock:
            if uid not in self._seen:
                self._put(uid, node, pod)

    def forget(self, uid: str) -> None:
        """The binding failed; what the API already shows stays."""
        with self._lock:
            if uid not in self._seen:
                self._take(uid)

    def gone(self, uid: str) -> bool:
        """The pod is deleted or has ended; whether it held anything."""
        with self._lock:
            self._seen.discard(uid)
            return self._take(uid)

    def snapshot(self) -> list[tuple[Raw, Mapping[str, int]]]:
        """Every node by name, with what is reserved there."""
        with self._lock:
            return [(self._nodes[name], self._used.get(name, {})) for name in sorted(self._nodes)]

    def _put(self, uid: str, node: str, pod: Raw) -> None:
        self._take(uid)
        requests = requests_of(pod)
        self._pods[uid] = node, requests
        self._used[node] = add(self._used.get(node, {}), requests)

    def _take(self, uid: str) -> bool:
        node, requests = self._pods.pop(uid, ("", {}))
        if node:
            self._used[node] = add(self._used[node], {name: -amount for name, amount in requests.items()})
        return bool(node)


def _essence(node: Raw) -> tuple[Any, ...]:
    meta = node["metadata"]
    return node.get("spec"), meta.get("labels"), meta.get("annotations"), (node.get("status") or {}).get("allocatable")
