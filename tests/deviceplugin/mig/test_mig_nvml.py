"""The names of MIG profiles, and the functions of NVML that the driver calls."""

import inspect
from pathlib import Path

import pynvml
import pytest

from deviceplugin.mig.mig_nvml import Nvml, profile_name
from playground.simulated_nvml import SimulatedNvml

MIB = 1 << 20


@pytest.mark.parametrize(
    ("total", "kind", "slices", "megabytes", "name"),
    [
        (40536, 0, 1, 4864, "1g.5gb"),
        (40536, 7, 1, 4864, "1g.5gb+me"),
        (40536, 9, 1, 9856, "1g.10gb"),
        (40536, 4, 7, 40192, "7g.40gb"),
        (24258, 0, 1, 5952, "1g.6gb"),
        (24258, 8, 2, 11968, "2g.12gb+me"),
        (95830, 9, 1, 22016, "1g.24gb"),
        (143771, 2, 3, 71424, "3g.71gb"),
        (97887, 10, 1, 24064, "1g.24gb+gfx"),
        (97887, 13, 1, 24064, "1g.24gb-me"),
        (97887, 16, 2, 48512, "2g.48gb+me.all"),
    ],
)
def test_profile_is_named_as_nvidia_smi_names_it(total: int, kind: int, slices: int, megabytes: int, name: str) -> None:
    assert profile_name(kind, slices, megabytes, total * MIB) == name


@pytest.mark.parametrize("name", [name for name in vars(Nvml) if name.startswith("nvml")])
@pytest.mark.parametrize("nvml", [pynvml, SimulatedNvml(Path("unused"), ())], ids=["pynvml", "simulated"])
def test_every_nvml_function_accepts_the_arguments_of_the_driver(nvml: object, name: str) -> None:
    """The functions of pynvml have no type annotations, so without a card only this test finds wrong arguments."""
    ours = list(inspect.signature(getattr(Nvml, name)).parameters)[1:]
    theirs = inspect.signature(getattr(nvml, name))
    theirs.bind(*(one for one in ours if one != "version"), **({"version": 1} if "version" in ours else {}))
