"""A scheduling loop like kube-scheduler's: fit, extender, score, assume, bind; one pod at a time, bindings beside.

Limits: no preemption, no volumes, no pod affinity or spread; the only score of its own is the least allocated node.
"""

from playground.scheduling.extender import Extender
from playground.scheduling.loop import Scheduling

__all__ = ["Extender", "Scheduling"]
