"""The engine, which decides whether a pod fits on a node, which cards it gets there, and how good the node is for it.

Mainly `scheduler.decisions` and `mgpu simulate` call it. The modules of this package must use neither a clock nor the
API server, so that the scheduler process and `mgpu simulate` decide alike.
"""

from scheduler.engine.card_policy import Policy
from scheduler.engine.effort import BRIEF, FULL, LEAST, QUICK, SHORT, Effort, Limits
from scheduler.engine.node_score import node_score
from scheduler.engine.placement import place
from scheduler.engine.policies import NODE_POLICIES, POLICIES, policy_named

__all__ = [
    "BRIEF",
    "FULL",
    "LEAST",
    "NODE_POLICIES",
    "POLICIES",
    "QUICK",
    "SHORT",
    "Effort",
    "Limits",
    "Policy",
    "node_score",
    "place",
    "policy_named",
]
