"""The registry of the card policies.

The settings, the annotation `mgpu.io/card-policy`, the command lines and the placement engine read it. Each policy is
implemented in the module of its name in `scheduler/engine/policies/`, which only the scheduler imports. To add a
policy, add its name and its module (CONTRIBUTING.md, "Adding a policy"). The names are API.
"""

SELECTABLE = (
    "binpack",
    "spread",
    "fragmentation",
    "fgd",
)
"""The policies that users can select, in the order in which messages list them."""

DIALECT_DEFAULTS = (
    "minor",
    "bestfit",
)
"""The policies that dialects use by default and users cannot select."""
