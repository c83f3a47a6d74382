"""Stores which ResourceClaimTemplates pods refer to, and which converted pods wait for their claim.

`scheduler.claims.templates` creates and removes the templates. `ClaimPods` uses `ConvertedPods` with the lock of the
cluster cache held.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mgpu.model.converted_requests import (
    CONVERTED,
    ConvertedRequests,
    has_claim,
    is_generated_name,
    pod_claim,
    read_converted,
    template_references,
)
from mgpu.model.errors import BadObject
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import table_at

Raw = Mapping[str, Any]

_MOST_REFERENCES = 32
"""The references of a pod that are stored. A converted pod has one, and the API server accepts thousands."""
_LONGEST_ANNOTATION = 64 << 10
"""The most characters of the annotation of a converted pod. Where no webhook protects it, a user may write any."""


@dataclass(frozen=True, slots=True)
class ConvertedPod:
    """A converted pod whose claim does not exist yet. `converted` is without the original resources."""

    uid: str
    namespace: str
    name: str
    converted: ConvertedRequests


class ConvertedPods:
    """Part of the ClusterCache, which holds its lock around every call."""

    def __init__(self) -> None:
        self._without_claim: dict[str, ConvertedPod] = {}
        self._references: dict[str, frozenset[tuple[str, str]]] = {}

    def pod_changed(self, raw: Raw, pod: Pod) -> None:
        """Store a pod of any kind that was added or modified.

        Args:
            pod: The same pod as `read_pod` returns it.
        """
        generated = (name for name in template_references(raw) if is_generated_name(name))
        names = frozenset((pod.namespace, name) for name in islice(generated, _MOST_REFERENCES))
        if not names or pod.ended:
            self.pod_gone(pod.uid)
            return
        self._references[pod.uid] = names
        waiting = None if pod.deleting or has_claim(raw) else converted_pod(raw, pod)
        if waiting is None:
            self._without_claim.pop(pod.uid, None)
        else:
            self._without_claim[pod.uid] = waiting

    def pod_gone(self, uid: str) -> None:
        self._without_claim.pop(uid, None)
        self._references.pop(uid, None)

    def without_claim(self) -> tuple[ConvertedPod, ...]:
        """Return the converted pods that have no claim, by namespace, name and UID."""
        return tuple(sorted(self._without_claim.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid)))

    def referred_templates(self) -> frozenset[tuple[str, str]]:
        """Return the namespaces and names of the generated templates that pods refer to which have not ended."""
        return frozenset().union(*self._references.values())


def converted_pod(raw: Raw, pod: Pod) -> ConvertedPod | None:
    """Return the pod if its annotation agrees with its claim; None for any other pod.

    The annotation of a pod that the conversion has written always agrees.
    """
    text = table_at(raw, "metadata", "annotations").get(CONVERTED)
    if not isinstance(text, str) or len(text) > _LONGEST_ANNOTATION:
        return None
    try:
        converted = read_converted(text)
    except BadObject:
        return None
    rows = table_at(raw, "spec").get("resourceClaims")
    if not isinstance(rows, list) or pod_claim(converted) not in rows:
        return None
    return ConvertedPod(pod.uid, pod.namespace, pod.name, replace(converted, original={}))
