"""The API server of the state machine, without HTTP: it stores pods by name, and calls watchers."""

from collections.abc import Callable, Mapping
from typing import Any

from mgpu.kube import ApiError

Raw = dict[str, Any]
Watcher = Callable[[str, Raw], None]


class Cluster:
    """The stored pods. The playground's pod workers call `patch` and `delete`.

    Pods are replaced and never changed in place, so that events keep their content. `last` has the last state by UID.
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
        """Change the status of a pod, with its UID as a precondition."""
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
