"""The interface of the scheduler process to its HTTP side.

`scheduler.runtime.Process` implements the interface, which exists because the layers of the packages (CONTRIBUTING.md)
forbid `scheduler.api` to import `scheduler.runtime`. All members may be used from any thread.
"""

from collections.abc import Mapping
from typing import Protocol

from mgpu.kube import Api
from mgpu.serving.metrics import Watch
from mgpu.settings import Settings
from scheduler.announcements import Announcements
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.decider import Decider
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_filter import GangFilter
from scheduler.decisions.in_flight_filter import InFlightFilter
from scheduler.decisions.open_claims import OpenClaims
from scheduler.decisions.preemption import Preemption
from scheduler.decisions.suggestions import Suggestions
from scheduler.partitioning.partition_controller import PartitionController


class Replica(Protocol):
    """One replica of the scheduler: its parts, and whether it may answer and decide now.

    Attributes:
        state: The cache of the cluster.
        in_flight: The filter for calls of kube-scheduler.
        gang_filter: The part of it that chooses the places of gangs.
        planning: The controller that plans partitions.
    """

    api: Api
    settings: Settings
    state: ClusterCache
    decider: Decider
    claim_decider: ClaimDecider
    open_claims: OpenClaims
    filter: Filter
    in_flight: InFlightFilter
    gang_filter: GangFilter
    preemption: Preemption
    suggestions: Suggestions
    planning: PartitionController
    announcements: Announcements

    def not_ready_reason(self) -> str | None:
        """Return why this replica is not ready (`/readyz`), or None if it is ready."""

    def not_deciding_reason(self) -> str | None:
        """Return why this replica does not decide, or None if it decides."""

    def may_answer(self) -> None:
        """Raise RetryLater while the cache is incomplete, so that this replica must not answer from it."""

    def may_decide(self) -> None:
        """Raise RetryLater while this replica must not decide and write."""

    @property
    def leading(self) -> bool:
        """Whether this replica leads. Without leader election, each replica leads until it ends."""

    @property
    def labelled(self) -> bool:
        """Whether this replica decides, and its pod is the only one with the label that the Service selects."""

    def watches(self) -> Mapping[str, Watch]:
        """Return all watches by the names under which the metrics show them."""
