from pathlib import Path

import pytest

from tests.deviceplugin.mig.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """An A100 in MIG mode, nothing on it."""
    return Rig(tmp_path).on()
