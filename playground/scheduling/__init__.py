"""A scheduling loop like kube-scheduler's: filter, extender, score, assume, bind; one pod at a time.

Preemption, volumes, pod affinity and topology spread are left out. Its own score is LeastAllocated.
"""

from playground.scheduling.extender_client import Extender
from playground.scheduling.loop import Scheduling

__all__ = ["Extender", "Scheduling"]
