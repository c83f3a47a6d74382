"""The client side of a scheduler extender (k8s.io/kube-scheduler/extender/v1: keys are capitalised)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import urllib3

Raw = Mapping[str, Any]
_MAX_SCORE, _SCALE = 10, 10


class ExtenderError(Exception):
    """The extender failed; unless it is ignorable, the pod cannot be scheduled now."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """Nodes that remain, and why the others do not. `hopeless`: eviction cannot help there."""

    nodes: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    hopeless: Mapping[str, str] = field(default_factory=dict)


class Extender:
    """One entry of KubeSchedulerConfiguration's `extenders`, and the calls to it.

    managed: resource name → ignoredByScheduler; where there are none, every pod is of interest.
    """

    def __init__(
        self,
        url: str,
        *,
        weight: int = 1,
        managed: Mapping[str, bool] | None = None,
        node_cache_capable: bool = True,
        ignorable: bool = False,
        timeout: float = 5.0,
    ) -> None:
        self.weight, self.ignorable = weight, ignorable
        self._url, self._managed, self._names_only = url.rstrip("/"), dict(managed or {}), node_cache_capable
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(total=timeout), retries=False)

    @property
    def ignored(self) -> frozenset[str]:
        """The resources that the scheduler itself is not to compare."""
        return frozenset(name for name, ignored in self._managed.items() if ignored)

    def interested(self, pod: Raw) -> bool:
        containers = [*(pod["spec"].get("initContainers") or ()), *(pod["spec"].get("containers") or ())]
        named = {
            name
            for container in containers
            for amounts in (container.get("resources") or {}).values()
            if isinstance(amounts, dict)
            for name in amounts
        }
        return not self._managed or not named.isdisjoint(self._managed)

    def filter(self, pod: Raw, nodes: Sequence[Raw]) -> Filtered:
        """Raises ExtenderError."""
        answer = self._post("filter", pod, nodes)
        if not isinstance(answer, dict):
            raise ExtenderError("filter: the answer is no object")
        if answer.get("Error"):
            raise ExtenderError(str(answer["Error"]))
        remaining: list[str] = []
        if self._names_only and answer.get("NodeNames") is not None:
            remaining = list(answer["NodeNames"])
        elif answer.get("Nodes") is not None:
            remaining = [node["metadata"]["name"] for node in answer["Nodes"]["items"]]
        unknown = set(remaining) - {node["metadata"]["name"] for node in nodes}
        if unknown:
            raise ExtenderError(f"extender claims a filtered node {min(unknown)!r} which is not found")
        return Filtered(
            tuple(remaining), answer.get("FailedNodes") or {}, answer.get("FailedAndUnresolvableNodes") or {}
        )

    def prioritize(self, pod: Raw, nodes: Sequence[Raw]) -> dict[str, int]:
        """Score by node, weighed. As in kube-scheduler, an answer that does not decode (8.0 for 8) counts nothing."""
        try:
            rows = self._post("prioritize", pod, nodes)
        except ExtenderError:
            return {}
        if not isinstance(rows, list) or any(type(row.get("Score")) is not int for row in rows):
            return {}
        return {row["Host"]: min(row["Score"], _MAX_SCORE) * self.weight * _SCALE for row in rows}

    def _post(self, verb: str, pod: Raw, nodes: Sequence[Raw]) -> Any:
        body: dict[str, Any] = {"Pod": pod, "Nodes": None, "NodeNames": None}
        if self._names_only:
            body["NodeNames"] = [node["metadata"]["name"] for node in nodes]
        else:
            body["Nodes"] = {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": list(nodes)}
        try:
            headers = {"Content-Type": "application/json"}
            answer = self._pool.request("POST", f"{self._url}/{verb}", body=orjson.dumps(body), headers=headers)
            if answer.status != 200:
                raise ExtenderError(f"failed {verb} with extender at URL {self._url}/{verb}, code {answer.status}")
            return orjson.loads(answer.data)
        except urllib3.exceptions.HTTPError as error:
            raise ExtenderError(f'Post "{self._url}/{verb}": {error}') from error
        except orjson.JSONDecodeError as error:
            raise ExtenderError(f"{verb}: {error}") from error
