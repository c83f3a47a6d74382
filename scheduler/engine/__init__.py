"""The engine: pure functions over `mgpu.model` that decide which cards a pod gets, and on which node.

`place` chooses cards, `node_score` scores nodes, and `POLICIES` and `NODE_POLICIES` contain the policies. The modules
of this package must use neither a clock nor the API server, so that the scheduler process, `mgpu simulate` and the
benchmarks decide alike.
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
