"""The sections of the benchmark, in the order in which `make bench` runs them."""

from collections import Counter
from importlib import import_module

from bench.rows import Options, Row

SECTIONS = (
    "placement",
    "hard",
    "slices",
    "cutting",
    "admission",
    "filter",
    "binding",
    "tenants",
    "startup",
    "learning",
    "page",
    "commands",
    "processes",
    "allocate",
    "starts",
    "endtoend",
    "created_to_bound",
    "bursts",
    "claim_bursts",
    "scale",
)
LONG = ("scale",)
"""The sections that `make bench` does not run, because they take many minutes. They run if they are named."""


def title(section: str) -> str:
    """Return the first line of the section's docstring."""
    return str(import_module(f"bench.{section}").__doc__).partition("\n")[0]


def measure(section: str, options: Options) -> tuple[Row, ...]:
    """Run a section. Its module is imported only now, because most sections import a whole process.

    Raises:
        Skipped: if the section cannot be measured here.
        ValueError: if two rows have the same name.
    """
    found: tuple[Row, ...] = tuple(import_module(f"bench.{section}").rows(options))
    twice = [what for what, count in Counter(row.what for row in found).items() if count > 1]
    if twice:
        raise ValueError(f"{section} has several rows {', '.join(twice)}")
    return found
