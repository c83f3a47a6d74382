from pathlib import Path

import pytest

from tests.deviceplugin.mig.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Return an A100 in MIG mode without instances."""
    return Rig(tmp_path).on()
