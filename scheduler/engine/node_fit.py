"""Defines the answer to the question whether a pod fits on one node, and the highest score of a node.

Mainly `decisions.filter`, `decisions.slice_filter` and `partitioning.slice_choice` return a `NodeFit` for each node.
The modules that score nodes use `HIGHEST`.
"""

from typing import NamedTuple

from mgpu.model.gpu_requests import Rejection

HIGHEST = 10
"""The highest score of a node in kube-scheduler's extender protocol; the lowest is 0."""


class NodeFit(NamedTuple):
    """The answer for one node.

    Attributes:
        rejection: The reason why the pod does not fit now, shortened by `Rejection.summary`; None if it fits.
        score: The score of the node, 0 to 10, if the pod fits and the caller requested scores.
        fits_repartitioned: Whether the pod would fit if the node's cards were partitioned differently.
    """

    rejection: Rejection | None = None
    score: int = 0
    fits_repartitioned: bool = False

    @property
    def fits(self) -> bool:
        return self.rejection is None

    @property
    def proven(self) -> bool:
        """Whether a search with higher limits would give the same answer to the question whether the pod fits."""
        return self.rejection is None or self.rejection.proven
