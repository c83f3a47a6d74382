"""The engine: pure functions over `mgpu.model` that decide which cards a pod gets, and on which node.

`place` chooses cards, `node_score` rates nodes, and the tables hold the policies. The modules of this package may use
neither clock nor API server, so that the scheduler process, `mgpu simulate` and the benches decide alike.
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
