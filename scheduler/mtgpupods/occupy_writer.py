"""Creates and deletes the occupy pods of a node, as its plan says."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mgpu.kube import ApiError
from mgpu.settings import Settings
from scheduler.mtgpupods import occupy_pods
from scheduler.mtgpupods.backoff import Paces
from scheduler.mtgpupods.mtgpupod_writer import Writer
from scheduler.mtgpupods.node_plan import Plan
from scheduler.mtgpupods.observation import Look, occupy_key
from scheduler.mtgpupods.occupy_pods import Create, Delete
from scheduler.mtgpupods.outcome import FALSE, Said

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Refusals:
    """failed: whether any occupy pod could not be made. why: by GPUID, where the API server says why."""

    failed: bool = False
    why: dict[str, Said] = field(default_factory=dict)


class Occupying:
    """is_due: whether something of a node may be made again (`Controller._is_due`)."""

    def __init__(self, writer: Writer, settings: Settings, paces: Paces, is_due: Callable[[str, str], bool]) -> None:
        self._writer, self._settings, self._paces, self._is_due = writer, settings, paces, is_due

    def create(self, node: str, found: Look, planned: Plan) -> Refusals:
        """Create those that are missing, unless it is too early for them."""
        refusals = Refusals()
        for gpuid, there in found.seen.occupies.items():
            if there.running:
                self._paces.forget(node, gpuid)
        for step in planned.occupy:
            if isinstance(step, Create) and self._is_due(node, step.gpuid):
                try:
                    self._writer.make(occupy_pods.manifest(node, step.gpuid, self._settings))
                except ApiError as error:
                    refusals.failed = True
                    if error.status != 409:
                        log.warning("occupy pod not made: %s", error, extra={"node": node, "gpuid": step.gpuid})
                        text = f"the pod that keeps a card of {node} could not be made: {error.message}"
                        refusals.why[step.gpuid] = Said(FALSE, "OccupyPodRefused", text)
        return refusals

    def delete(self, node: str, found: Look, planned: Plan) -> None:
        """Delete those that nobody needs. One that has ended by itself is made again after a pause."""
        for step in planned.occupy:
            if isinstance(step, Delete):
                self._writer.delete(*occupy_key(node, step.gpuid), step.uid, force=step.force)
                there = found.seen.occupies.get(step.gpuid)
                if there is not None and there.ended:
                    self._paces.slow(node, step.gpuid)
