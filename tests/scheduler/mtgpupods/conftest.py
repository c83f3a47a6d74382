"""The controller of MtgpuPods on a rig (tests/mtgpu_rig.py)."""

import pytest

from tests.mtgpu_rig import Rig


@pytest.fixture
def rig() -> Rig:
    """n1: two cards. s1: two that NVIDIA's plugin gives out."""
    return Rig(("n1", 2, False), ("s1", 2, True))
