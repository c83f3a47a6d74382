"""Whether a pod fits on one node: what the filter, the planner of slices and `mgpu simulate` get from the engine."""

from typing import NamedTuple

from mgpu.model.gpu_requests import Rejection

HIGHEST = 10
"""The highest score of a node in kube-scheduler's extender protocol; the lowest is 0."""


class NodeFit(NamedTuple):
    """The answer for one node.

    rejection: why the pod does not fit now, summed up in its reason (`Rejection.summary`); None where it fits.
    score: of the node, 0..10, where it fits and was asked for.
    fits_repartitioned: the pod fits once the node's cards are partitioned differently.
    """

    rejection: Rejection | None = None
    score: int = 0
    fits_repartitioned: bool = False

    @property
    def fits(self) -> bool:
        return self.rejection is None

    @property
    def proven(self) -> bool:
        """Whether a search with higher limits would answer the same."""
        return self.rejection is None or self.rejection.proven
