"""The GPU agent of the seed: which slices there are and which pods have them, in the Node's annotations."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mgpu.kube import Api, ApiError
from mgpu.model.errors import BadObject
from mgpu.model.node_slices import ANNOTATION, MADE, read_partitioning, with_status, write_made
from mgpu.model.slice_names import Slice

log = logging.getLogger(__name__)

Raw = dict[str, Any]
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """slices: with their pods, those alone that pods can be given. cards: that can be cut.

    done: the plan that they agree with. refused: the plan that cannot be applied, and why.
    """

    slices: tuple[Slice, ...] = ()
    cards: frozenset[int] = frozenset()
    done: int | None = None
    refused: tuple[int, str] | None = None


def annotations(node: Raw, report: Report | None) -> dict[str, str | None]:
    """What of a Node's annotations has to change so that they say this; None: that there are no slices here.

    A plan counts as applied or refused only where it is the one that the Node shows. What the scheduler wrote, and what
    nobody knows, stays; where it cannot be read nothing is written into it.
    """
    there = node["metadata"].get("annotations") or {}
    if report is None and MADE not in there:
        return {}  # whatever stands there is not ours
    text = there.get(ANNOTATION)
    wanted: dict[str, str | None] = {MADE: None}
    plan = None
    try:
        plan = read_partitioning(text).plan
        done = report.done if report and report.done == plan else None
        wanted[ANNOTATION] = with_status(text, report.slices if report else (), done)
    except BadObject as error:
        log.warning("the status of the slices is not written: %s", error)
    if report:
        refused = report.refused if report.refused and report.refused[0] == plan else None
        wanted[MADE] = write_made(report.slices, report.cards, refused)
    if text is None and wanted.get(ANNOTATION) == "{}":
        del wanted[ANNOTATION]
    return {key: value for key, value in wanted.items() if there.get(key) != value}


class Status:
    """node: as the watch has it. saw: hears of an own write: the Node before it, and after."""

    def __init__(self, api: Api, name: str, node: Callable[[], Raw | None], saw: Callable[[Raw, Raw], None]) -> None:
        self._api, self._path = api, f"/api/v1/nodes/{name}"
        self._node, self._saw = node, saw

    def write(self, report: Report | None) -> None:
        """Raises ApiError and Unreachable. Where another one wrote meanwhile, what it wrote is read first."""
        node = watched = self._node()
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
                    self._saw(watched, answer)
                return


def reported(
    slices: Collection[Slice], unwell: Collection[int], known: Callable[[str], bool]
) -> tuple[tuple[Slice, ...], bool]:
    """The slices that may be shown, and whether they are all: one in use always, a free one where a pod could have it.

    unwell: cards whose slices cannot be given. known: whether the kubelet would admit a pod that asks for such slices.
    """
    admitted = {name: known(name) for name in sorted({s.name for s in slices})}
    shown = tuple(sorted(s for s in slices if s.pod or (admitted[s.name] and s.card not in unwell)))
    return shown, all(admitted.values()) and not any(s.card in unwell for s in slices)
