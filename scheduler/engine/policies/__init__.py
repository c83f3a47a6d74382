"""Loads the card policies. Each has a module of its name in this package, which defines `POLICY`.

The names are in `mgpu.model.card_policies`, because the settings and the webhook validate them and must not import the
scheduler. The engine calls the policies, and pods and settings select them by name.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from mgpu.model.card_policies import DIALECT_DEFAULTS, SELECTABLE
from scheduler.engine.card_policy import CardPolicy, NodeScoring, Policy


def _load(name: str) -> CardPolicy:
    policy = import_module(f"{__name__}.{name}").POLICY
    if not isinstance(policy, CardPolicy):
        raise TypeError(f"{__name__}.{name}.POLICY is not a CardPolicy")
    return policy


POLICIES: Mapping[str, CardPolicy] = MappingProxyType({name: _load(name) for name in (*SELECTABLE, *DIALECT_DEFAULTS)})
"""The card policies, by name."""

NODE_POLICIES: Mapping[str, NodeScoring] = MappingProxyType(
    {name: policy.node_scoring for name, policy in POLICIES.items() if policy.node_scoring is not None}
)
"""The node policies, by name. A learning policy uses its function only until it has learnt (`decisions.scores`)."""


def policy_named(name: str, weight_of_core: int) -> Policy:
    """Return the policy of this name. Raises KeyError for an unknown name; the settings accept no such name.

    Args:
        weight_of_core: The weight of core in percent. The rest is the weight of memory.
    """
    return Policy(POLICIES[name].scoring, weight_of_core)
