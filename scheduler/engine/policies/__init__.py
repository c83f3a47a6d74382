"""The card policies: one module each, named as in the registry `mgpu.model.card_policies`, with a `POLICY`.

`mgpu.settings` validates policy names and must not import the scheduler, so the names live in `mgpu.model`. The modules
are found by name, as entry points are, so that no second list has to be kept.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from mgpu.model.card_policies import DIALECT_DEFAULTS, SELECTABLE
from scheduler.engine.card_policy import CardPolicy, NodeScoring, Policy


def _load(name: str) -> CardPolicy:
    policy = import_module(f"{__name__}.{name}").POLICY
    if not isinstance(policy, CardPolicy):
        raise TypeError(f"{__name__}.{name}.POLICY is no CardPolicy")
    return policy


POLICIES: Mapping[str, CardPolicy] = MappingProxyType({name: _load(name) for name in (*SELECTABLE, *DIALECT_DEFAULTS)})

NODE_POLICIES: Mapping[str, NodeScoring] = MappingProxyType(
    {name: policy.node_scoring for name, policy in POLICIES.items() if policy.node_scoring is not None}
)
"""The node policies, by name. Those that learn are used only until they have learnt (scheduler/decisions/scores.py)."""


def policy_named(name: str, weight_of_core: int) -> Policy:
    """Return the policy of this name for one pod. Raises KeyError for an unknown name; settings have none."""
    return Policy(POLICIES[name].scoring, weight_of_core)
