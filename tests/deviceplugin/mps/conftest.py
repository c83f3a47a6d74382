"""A folder for the daemons of MPS."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mps() -> Iterator[Path]:
    """Short, since sockets are in it; whatever still runs there ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
