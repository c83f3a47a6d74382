"""The fixture `rig` is a node with the label `mig` and one A100, `mps` one with the label `mps` and two."""

from pathlib import Path

import pytest

from tests.deviceplugin.partitioning.rig import Rig, gpu


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def mps(tmp_path: Path) -> Rig:
    return Rig(tmp_path, "mps", (gpu(0), gpu(1)))
