"""Reports in the Node's annotations which slices exist and which pods have them.

The scheduler plans and decides by what is written here (docs/design/slices.md, "Node annotation"). The partition worker
writes after every reconciliation; a write that would change nothing is not sent.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from mgpu.kube import Api, ApiError
from mgpu.model.errors import BadObject
from mgpu.model.node_slices import ANNOTATION, MADE, read_partitioning, with_status, write_made
from mgpu.model.slice_names import Slice

log = logging.getLogger(__name__)

Raw = dict[str, Any]
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class SliceReport:
    """What the Node is to say.

    Attributes:
        slices: with their pods; free slices only where pods can be given them.
        cards: the indexes of cards that can be cut.
        done: the plan that the slices agree with.
        refused: the plan that cannot be applied, and why.
    """

    slices: tuple[Slice, ...] = ()
    cards: frozenset[int] = frozenset()
    done: int | None = None
    refused: tuple[int, str] | None = None


def annotations(node: Raw, report: SliceReport | None) -> dict[str, str | None]:
    """Return the annotations of a Node that have to change so that they report this; None removes an annotation.

    A plan is reported as applied or refused only where it is the one in the Node: the scheduler may have written
    another one meanwhile. What others wrote into the shared annotation stays; where that cannot be read it is left
    alone.

    Args:
        report: None where no card of the node is cut.
    """
    there = node["metadata"].get("annotations") or {}
    if report is None and MADE not in there:
        return {}  # the other annotation is not the agent's then
    text = there.get(ANNOTATION)
    wanted: dict[str, str | None] = {MADE: None}
    plan = None
    try:
        plan = read_partitioning(text).plan
        done = report.done if report and report.done == plan else None
        wanted[ANNOTATION] = with_status(text, report.slices if report else (), done)
    except BadObject as error:
        log.warning("the status of slices is not written: %s", error)
    if report:
        refused = report.refused if report.refused and report.refused[0] == plan else None
        wanted[MADE] = write_made(report.slices, report.cards, refused)
    if text is None and wanted.get(ANNOTATION) == "{}":
        del wanted[ANNOTATION]
    return {key: value for key, value in wanted.items() if there.get(key) != value}


class NodeWatch(Protocol):
    """The Node as a watch keeps it (`deviceplugin.inventory.reporter`)."""

    @property
    def node(self) -> Raw | None:
        """The Node; None: not known yet, or gone."""

    def wrote_node(self, before: Raw, after: Raw) -> None:
        """Take over the answer to a write, unless the watch has moved on from `before`."""


class NodeStatusWriter:
    """Writes the annotations of one Node, for the partition worker's thread."""

    def __init__(self, api: Api, name: str, watch: NodeWatch) -> None:
        self._api = api
        self._path = f"/api/v1/nodes/{name}"
        self._watch = watch

    def write(self, report: SliceReport | None) -> None:
        """Make the Node report this. After a conflict the Node is read again first. Raises ApiError and Unreachable."""
        node = watched = self._watch.node
        for attempt in range(_ATTEMPTS):
            if node is None or not (changed := annotations(node, report)):
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


def reportable(
    slices: Collection[Slice], unwell: Collection[int], known: Callable[[str], bool]
) -> tuple[tuple[Slice, ...], bool]:
    """Return the slices that may be reported, and whether these are all.

    A slice in use is always reported, a free one where a pod that gets it can start.

    Args:
        unwell: the indexes of cards whose slices must not be given out.
        known: whether the kubelet would admit a pod that requests slices of this name.
    """
    admitted = {name: known(name) for name in sorted({s.name for s in slices})}
    shown = tuple(sorted(s for s in slices if s.pod or (admitted[s.name] and s.card not in unwell)))
    return shown, all(admitted.values()) and not any(s.card in unwell for s in slices)
