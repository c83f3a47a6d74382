"""The placement engine: pure functions over the model. `place(ask, cards, policy)` → Placement | Rejection."""

from scheduler.placement.engine import DEFAULT_BUDGET, place
from scheduler.placement.node_score import NODE_POLICIES, node_score
from scheduler.placement.policies import POLICIES, Policy, policy_named

__all__ = ["DEFAULT_BUDGET", "NODE_POLICIES", "POLICIES", "Policy", "node_score", "place", "policy_named"]
