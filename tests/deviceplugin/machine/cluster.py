"""The API server of the state machine: pods by name, every change handed to whoever watches; no HTTP."""

from collections.abc import Callable, Mapping
from typing import Any

from mgpu.kube import ApiError

Raw = dict[str, Any]
Watcher = Callable[[str, Raw], None]


class Cluster:
    """`patch` and `delete` are what the playground's pod workers call. `last`: each UID's pod as it last was.

    A pod is replaced, never edited in place: who got an event keeps what it was then.
    """

    def __init__(self) -> None:
        self.pods: dict[str, Raw] = {}
        self.last: dict[str, Raw] = {}
        self.watchers: list[Watcher] = []

    def put(self, raw: Raw) -> None:
        self.pods[raw["metadata"]["name"]] = self.last[raw["metadata"]["uid"]] = raw
        self._tell("put", raw)

    def edit(self, name: str, **metadata: Any) -> None:
        raw = self.pods[name]
        self.put({**raw, "metadata": {**raw["metadata"], **metadata}})

    def remove(self, name: str) -> None:
        self._tell("gone", self.pods.pop(name))

    def patch(self, path: str, patch: Mapping[str, Any], _kind: str) -> None:
        """The status of a pod, with its UID as a precondition."""
        name = path.removesuffix("/status").rpartition("/")[2]
        self._check(name, patch["metadata"]["uid"])
        raw = self.pods[name]
        self.put({**raw, "status": {**raw["status"], **patch["status"]}})

    def delete(self, path: str, body: Mapping[str, Any]) -> None:
        name = path.rpartition("/")[2]
        self._check(name, body["preconditions"]["uid"])
        self.remove(name)

    def _check(self, name: str, uid: str) -> None:
        if name not in self.pods:
            raise ApiError(404, "NotFound", name)
        if self.pods[name]["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", name)

    def _tell(self, what: str, raw: Raw) -> None:
        for watcher in list(self.watchers):
            watcher(what, raw)
