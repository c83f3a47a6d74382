"""The registry of the card policies.

The placement engine loads each policy from the module of its name in `scheduler/engine/policies/`. CONTRIBUTING.md,
"Adding a policy", describes how to add one. Users write the names in settings, annotations and flags, so the names must
not change.
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
"""Policies that dialects use by default, and that users cannot select."""
