"""The small trace, as files and as read."""

from pathlib import Path

import pytest

from playground.simulate.openb.trace import Trace, read_trace
from tests.playground.simulate.openb.traces import written


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path)


@pytest.fixture
def trace(files: tuple[Path, Path]) -> Trace:
    return read_trace(*files)
