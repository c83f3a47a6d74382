"""Reports in the Node's annotations which slices exist and which pods use them.

`partition_worker` writes a report after every reconciliation. The scheduler reads these annotations when it plans and
decides (docs/design/slices.md, "Node annotation"). A write that would change nothing is not sent.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from mgpu.kube import Api, ApiError
from mgpu.model.errors import BadObject
from mgpu.model.node_slices import ANNOTATION, EXISTING, read_partitioning, with_status, write_existing
from mgpu.model.slice_names import Slice

log = logging.getLogger(__name__)

Raw = dict[str, Any]
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class SliceReport:
    """The content of a report.

    Attributes:
        slices: The slices, with their pods. A free slice is included only if a pod that gets it can start.
        cards: The indexes of the cards that can be partitioned.
        applied: The number of the plan with which the slices agree, or None.
        refused: The number of the plan that cannot be applied, and the reason; None if no plan is refused.
    """

    slices: tuple[Slice, ...] = ()
    cards: frozenset[int] = frozenset()
    applied: int | None = None
    refused: tuple[int, str] | None = None


def changed_annotations(node: Raw, report: SliceReport | None) -> dict[str, str | None]:
    """Return the annotations that must be written so that the Node agrees with the report.

    The value None removes an annotation.

    A plan is reported as applied or refused only if it is still the Node's plan: the scheduler may have written another
    one in the meantime. The scheduler writes keys of its own into the annotation `ANNOTATION`. These keys stay, and if
    the annotation is not readable, it is not changed.

    Args:
        report: The report; None if mgpu does not partition the cards of the node.
    """
    current = node["metadata"].get("annotations") or {}
    if report is None and EXISTING not in current:
        return {}  # The agent has written nothing into this Node, so `ANNOTATION` belongs to another program.
    text = current.get(ANNOTATION)
    desired: dict[str, str | None] = {EXISTING: None}
    plan = None
    try:
        plan = read_partitioning(text).plan
        applied = report.applied if report and report.applied == plan else None
        desired[ANNOTATION] = with_status(text, report.slices if report else (), applied)
    except BadObject as error:
        log.warning("the status of slices is not written: %s", error)
    if report:
        refused = report.refused if report.refused and report.refused[0] == plan else None
        desired[EXISTING] = write_existing(report.slices, report.cards, refused)
    if text is None and desired.get(ANNOTATION) == "{}":
        del desired[ANNOTATION]
    return {key: value for key, value in desired.items() if current.get(key) != value}


class NodeWatch(Protocol):
    """The part of `deviceplugin.inventory.node_objects.NodeObjects` that is used here."""

    @property
    def node(self) -> Raw | None:
        """The Node; None if it has not been read yet, or does not exist."""

    def wrote_node(self, before: Raw, after: Raw) -> None:
        """Store the answer to a write in place of `before`, unless the watch has delivered another version."""


class NodeStatusWriter:
    """The writer of one Node's annotations. Only the partition worker's thread uses it."""

    def __init__(self, api: Api, name: str, watch: NodeWatch) -> None:
        self._api = api
        self._path = f"/api/v1/nodes/{name}"
        self._watch = watch

    def write(self, report: SliceReport | None) -> None:
        """Write the report into the Node if the Node has been read. Raises ApiError and Unreachable.

        After a conflict the Node is read again, and the write is repeated up to four times.
        """
        node = watched = self._watch.node
        for attempt in range(_ATTEMPTS):
            if node is None or not (changed := changed_annotations(node, report)):
                return
            meta = {"resourceVersion": node["metadata"]["resourceVersion"], "annotations": changed}
            try:
                answer = self._api.patch(self._path, {"metadata": meta})
            except ApiError as error:
                if error.status != 409 or attempt == _ATTEMPTS - 1:
                    raise
                node = self._api.get(self._path)
            else:
                log.info("slices reported", extra={"annotations": changed})
                if watched is not None:
                    self._watch.wrote_node(watched, answer)
                return


def reportable_slices(
    slices: Collection[Slice], unhealthy: Collection[int], is_registered: Callable[[str], bool]
) -> tuple[tuple[Slice, ...], bool]:
    """Return the slices that may be reported, and whether all of `slices` could be reported even if they were free.

    A slice in use is always reported. A free slice is reported only if a pod that gets it can start.

    Args:
        unhealthy: The indexes of the cards whose slices must not be given out.
        is_registered: A function that returns whether the kubelet would admit a pod that requests slices of this name.
    """
    admitted = {name: is_registered(name) for name in sorted({s.name for s in slices})}
    reported = tuple(sorted(s for s in slices if s.pod or (admitted[s.name] and s.card not in unhealthy)))
    return reported, all(admitted.values()) and not any(s.card in unhealthy for s in slices)
