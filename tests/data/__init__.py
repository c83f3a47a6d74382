"""Tables of facts that tests compare mgpu with. Each file names its source at its head."""

from pathlib import Path
from typing import Any

import yaml


def load(name: str) -> Any:
    """Return the content of `tests/data/<name>.yaml`."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())
