"""docs/annotations.md lists every name under `mgpu.io` that the code and the manifests use, and no others."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "annotations.md"
NAME = re.compile(r"(?<![\w.-])mgpu\.io/([a-z]+(?:-[a-z]+)*)")
COMPOSED = re.compile(r'(?:\bPREFIX \+ "|\{MGPU\}/)([a-z]+(?:-[a-z]+)*)"')
"""A name that is composed of a constant and a literal, in a module that defines the constant as `mgpu.io`."""


def used() -> set[str]:
    """Return the names in the sources of the processes, and in the manifests."""
    found: set[str] = set()
    for folder in ("mgpu", "webhook", "scheduler", "deviceplugin"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            found |= set(NAME.findall(text))
            if re.search(r'^(PREFIX|MGPU) = "mgpu\.io/?"', text, re.MULTILINE) or "import PREFIX" in text:
                found |= set(COMPOSED.findall(text))
    for file in (ROOT / "manifests").rglob("*.yaml"):
        found |= set(NAME.findall(file.read_text()))
    return found


def listed() -> set[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in NAME.findall(row.split("|")[1])}


def test_the_page_lists_each_name_that_is_used() -> None:
    assert sorted(used() - listed()) == []


def test_each_listed_name_is_used() -> None:
    assert sorted(listed() - used()) == []
