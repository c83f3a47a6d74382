"""Makes the table of the chart's values in docs/chart.md, from the comments of values.yaml.

It also finds the values that have no comment there, or that values.schema.json does not know.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "manifests" / "chart" / "mgpu"
TABLE = ROOT / "docs" / "chart.md"

Json = dict[str, Any]


@dataclass
class Value:
    """A key of values.yaml.

    Attributes:
        path: the names of the key and of those above it, with dots.
        text: the comment above the key, which is its description; empty if there is none.
        default: what the key contains.
        children: the keys below it.
    """

    path: str
    text: str
    default: object
    children: "list[Value]" = field(default_factory=list)

    @property
    def is_described_by_parts(self) -> bool:
        """Whether the table has rows for keys of this key, and not for the key itself."""
        described = any(child.text or child.is_described_by_parts for child in self.children)
        return described and "properties" in schema_at(self.path)


def values() -> list[Value]:
    """Return the keys at the top of values.yaml, with all keys below them.

    The comments of a YAML file are not in the objects that a library returns, so the keys are also searched as text.
    """
    top = Value("", "", yaml.safe_load((CHART / "values.yaml").read_text()))
    opened = [(-1, top)]
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("# "):
            comment.append(line.strip().removeprefix("# "))
            continue
        if match := re.match(r" *([A-Za-z]+):(?: |$)", line):
            while opened[-1][0] >= indent:
                opened.pop()
            above = opened[-1][1]
            assert isinstance(above.default, dict)
            value = Value(f"{above.path}.{match[1]}".lstrip("."), " ".join(comment), above.default[match[1]])
            above.children.append(value)
            opened.append((indent, value))
        comment = []
    return top.children


def schema_at(path: str) -> Json:
    """Return the part of values.schema.json for a key. Raises KeyError if the schema does not allow the key."""
    schema: Json = json.loads((CHART / "values.schema.json").read_text())
    found = schema
    for name in path.split(".") if path else ():
        found = found["properties"][name]
        if "$ref" in found:
            found = schema["definitions"][found["$ref"].removeprefix("#/definitions/")]
    return found


def problems() -> list[str]:
    """Return what is missing in values.yaml and values.schema.json."""
    found = []

    def visit(value: Value) -> None:
        try:
            allowed = schema_at(value.path)
        except KeyError:
            found.append(f"values.schema.json does not allow {value.path}")
            return
        if value.is_described_by_parts:
            names = {child.path.rpartition(".")[2] for child in value.children}
            found.extend(f"values.yaml has no {value.path}.{name}" for name in set(allowed["properties"]) - names)
            for child in value.children:
                visit(child)
        elif not value.text:
            found.append(f"values.yaml has no comment for {value.path}")

    top = values()
    for value in top:
        visit(value)
    missing = set(schema_at("")["properties"]) - {value.path for value in top} - {"global"}
    return found + [f"values.yaml has no {name}" for name in sorted(missing)]


def _linked(text: str) -> str:
    """Return the text with links to the pages that it names, as seen from docs/."""
    return re.sub(r"docs/([a-z-]+[.]md)", r"[\1](\1)", text)


def _rows(value: Value) -> Iterator[str]:
    """Yield the rows of a key, or of the keys below it."""
    if value.is_described_by_parts:
        for child in value.children:
            yield from _rows(child)
        return
    default = json.dumps(value.default)
    allowed = [json.dumps(v).strip('"') or '""' for v in schema_at(value.path).get("enum", ())]
    others = ", ".join(f"`{v}`" for v in allowed if v != (default.strip('"') or '""'))
    text = _linked(value.text)
    yield f"| `{value.path}` | `{default}` | {others} | {text.replace('|', chr(92) + '|')} |"


def table() -> str:
    """Return docs/chart.md with the table of all values in place of the present one."""
    lines = []
    top = values()
    single = [value for value in top if not value.is_described_by_parts]
    groups = [value for value in top if value.is_described_by_parts]
    head = ["| value | default | or | description |", "|---|---|---|---|"]
    for value in groups:
        intro = _linked(value.text)
        rows = list(_rows(value))
        lines += [f"### {value.path}", "", *([intro, ""] if intro else []), *head, *rows, ""]
    lines += ["### Others", "", *head, *(row for value in single for row in _rows(value)), ""]
    begin, end = "<!-- values: generated by manifests/chart/generate.py -->\n", "<!-- end -->"
    before, _, rest = TABLE.read_text().partition(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
