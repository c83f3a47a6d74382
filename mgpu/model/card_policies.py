"""The registry of the card policies.

The settings, the annotation `mgpu.io/card-policy`, the command lines and the placement engine read it. The engine's
part of a policy is the module of its name in `scheduler/engine/policies/`, which only the scheduler imports
(CONTRIBUTING.md, "Adding a policy").
"""

SELECTABLE = (
    "binpack",
    "spread",
    "fragmentation",
    "fgd",
)
"""The policies that users can choose, in the order in which messages list them."""

DIALECT_DEFAULTS = (
    "minor",
    "bestfit",
)
"""The policies that only dialects choose, as the default for their pods."""
