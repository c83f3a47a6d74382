"""`mgpu simulate` as its tests call it."""

import json
from collections.abc import Sequence
from typing import Any

import yaml
from click.testing import CliRunner, Result

from mgpu.cli.main import main
from tests.builders import node

CARDS = ({"model": "A100", "memory": "80Gi", "count": 2},)


def run(*arguments: str, objects: Sequence[Any] = (), text: str | None = None) -> Result:
    """Run the command with `objects`, or else `text`, as its standard input."""
    return CliRunner().invoke(main, ["simulate", *arguments], input=text or yaml.safe_dump_all(objects))


def simulated(*objects: Any, options: tuple[str, ...] = ()) -> Any:
    """Return the JSON output of a successful run."""
    result = run("-", "-o", "json", *options, objects=objects)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def served(name: str = "n1", cards: Any = CARDS, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a node with these cards, two A100 by default. `cards` may be malformed text."""
    raw = node(name, labels=labels)
    raw["metadata"]["annotations"]["mgpu.io/cards"] = cards if isinstance(cards, str) else json.dumps(cards)
    return raw
