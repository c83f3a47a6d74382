"""A scheduling loop like kube-scheduler's, which chooses the nodes of pods one after the other.

It scores nodes by LeastAllocated and by the scores of extenders, and allocates ResourceClaims (`claims`). It does not
implement preemption, volumes, pod affinity and topology spread constraints. `playground.cluster` starts the loop.
"""

from playground.scheduling.extender_client import Extender
from playground.scheduling.loop import Scheduling

__all__ = ["Extender", "Scheduling"]
