"""The registry of the card policies.

`mgpu.settings` reads the names of the policies for the settings, the annotation `mgpu.io/card-policy` and the command
lines, and the placement engine loads the policies by these names. Each policy is implemented in the module of its name
in `scheduler/engine/policies/`. To add a policy, add its name and its module (CONTRIBUTING.md, "Adding a policy").
Users write the names, so the names must not change.
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
"""The policies that dialects use by default, and that users cannot select."""
