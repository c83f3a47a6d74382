"""docs/mtgpu.md lists every reason that a condition of an MtgpuPod can have, and of no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def reasons() -> Iterator[str]:
    """The second argument of every `Condition(…)`."""
    for path in (ROOT / "scheduler" / "mtgpupods").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Condition":
                reason = node.args[1]
                assert isinstance(reason, ast.Constant), f"{path.name}:{node.lineno}: a reason is written out"
                yield str(reason.value)


def told() -> set[str]:
    """Those of the table of conditions."""
    text = (ROOT / "docs" / "mtgpu.md").read_text()
    table = text.partition("| condition | status, reason | |")[2].partition("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_docs_have_every_reason() -> None:
    assert told() == set(reasons())
