"""The placement engine: pure functions over the model. `place(ask, cards, policy)` → Placement | Rejection."""

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
