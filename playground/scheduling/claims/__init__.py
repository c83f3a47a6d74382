"""ResourceClaims in the scheduling loop, as kube-scheduler's plugin DynamicResources handles them.

`ClaimScheduling` is the plugin. `allocator` and the modules that it uses decide which devices a claim gets, and are
pure functions over API objects as JSON. These parts of the original are missing: binding conditions, the score for
alternatives, node-allocatable resources, and derived attributes.
"""

from playground.scheduling.claims.claim_scheduling import ClaimScheduling, PodClaims

__all__ = ["ClaimScheduling", "PodClaims"]
