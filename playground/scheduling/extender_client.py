"""A client for a scheduler extender (k8s.io/kube-scheduler/extender/v1) that receives and returns only node names.

The scheduling loop calls the extender for every pod that requests a managed resource. `playground.demo` calls it to
show why it rejects nodes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import urllib3

Raw = Mapping[str, Any]
_MAX_SCORE = 10
_SCALE = 10  # kube-scheduler multiplies an extender's scores of 0 to 10 by it, because its own scores are 0 to 100
_SECONDS = 5.0


class ExtenderError(Exception):
    """A call to the extender failed, so the pod cannot be scheduled now."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """The names of the nodes that passed the filter, and the reason for each node that failed it."""

    nodes: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)


class Extender:
    """A client of an extender with `nodeCacheCapable: true` and `ignorable: false` in the KubeSchedulerConfiguration.

    Args:
        url: The base URL of the extender.
        weight: The factor of its scores.
        managed: The names of the managed resources, each with its `ignoredByScheduler`. If there are none, every pod
            goes through the extender.
    """

    def __init__(self, url: str, *, weight: int = 1, managed: Mapping[str, bool] | None = None) -> None:
        self._url = url.rstrip("/")
        self._weight = weight
        self._managed = dict(managed or {})
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(total=_SECONDS), retries=False)

    @property
    def ignored(self) -> frozenset[str]:
        """The resources that the scheduler itself does not check, because of `ignoredByScheduler`."""
        return frozenset(name for name, ignored in self._managed.items() if ignored)

    def manages(self, pod: Raw) -> bool:
        """Return whether the pod goes through the extender.

        It does if one of its containers names a managed resource, or if no resources are managed.
        """
        containers = [*(pod["spec"].get("initContainers") or ()), *(pod["spec"].get("containers") or ())]
        named = {
            name
            for container in containers
            for amounts in (container.get("resources") or {}).values()
            if isinstance(amounts, dict)
            for name in amounts
        }
        return not self._managed or not named.isdisjoint(self._managed)

    def filter(self, pod: Raw, nodes: Iterable[str]) -> Filtered:
        """Return which of the nodes can run the pod. Raises ExtenderError if the call fails or its answer is wrong."""
        names = list(nodes)
        response = self._post("filter", pod, names)
        if not isinstance(response, dict):
            raise ExtenderError("filter: the response is no object")
        if response.get("Error"):
            raise ExtenderError(str(response["Error"]))
        remaining = response.get("NodeNames") or []
        if unknown := set(remaining) - set(names):
            raise ExtenderError(f"extender claims a filtered node {min(unknown)!r} which is not found")
        unresolvable = response.get("FailedAndUnresolvableNodes") or {}
        return Filtered(tuple(remaining), {**(response.get("FailedNodes") or {}), **unresolvable})

    def prioritize(self, pod: Raw, nodes: Iterable[str]) -> dict[str, int]:
        """Return the weighted scores by the names of the nodes. A score above 10 counts as 10.

        As in kube-scheduler, the result is empty if the call fails or its response does not decode, for example because
        a score is 8.0 instead of 8.
        """
        try:
            rows = self._post("prioritize", pod, list(nodes))
        except ExtenderError:
            return {}
        if not isinstance(rows, list) or not all(map(_is_host_priority, rows)):
            return {}
        return {row["Host"]: min(row["Score"], _MAX_SCORE) * self._weight * _SCALE for row in rows}

    def _post(self, verb: str, pod: Raw, names: Sequence[str]) -> Any:
        """Return the decoded response of a call. Raises ExtenderError."""
        body = {"Pod": pod, "Nodes": None, "NodeNames": names}
        try:
            headers = {"Content-Type": "application/json"}
            response = self._pool.request("POST", f"{self._url}/{verb}", body=orjson.dumps(body), headers=headers)
            if response.status != 200:
                raise ExtenderError(f"failed {verb} with extender at URL {self._url}/{verb}, code {response.status}")
            return orjson.loads(response.data)
        except urllib3.exceptions.HTTPError as error:
            raise ExtenderError(f'Post "{self._url}/{verb}": {error}') from error
        except orjson.JSONDecodeError as error:
            raise ExtenderError(f"{verb}: {error}") from error


def _is_host_priority(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("Host"), str) and type(row.get("Score")) is int
