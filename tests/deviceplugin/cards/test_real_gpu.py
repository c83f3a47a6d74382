"""The inventory on a machine with an NVIDIA GPU, compared with the output of `nvidia-smi`."""

import re
import shutil
import subprocess

import pytest

from deviceplugin.cards.nvml_cards import NvmlCards

_FIELDS = ("index", "uuid", "name", "memory.total")
_MINOR = re.compile(r"<uuid>(?P<uuid>[^<]+)</uuid>.*?<minor_number>(?P<minor>\d+)</minor_number>", re.DOTALL)


def nvidia_smi(*arguments: str) -> str:
    """Return its output. Skip the test if nvidia-smi, the driver or a GPU is missing."""
    path = shutil.which("nvidia-smi")
    if path is None:
        pytest.skip("no NVIDIA GPU: nvidia-smi is not installed")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode or not done.stdout.strip():
        pytest.skip(f"no NVIDIA GPU: nvidia-smi says {(done.stdout + done.stderr).strip()!r}")
    return done.stdout


def test_inventory_equals_the_output_of_nvidia_smi() -> None:
    table = nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    printed = [tuple(cell.strip() for cell in line.split(",")) for line in table.splitlines()]
    source = NvmlCards()
    try:
        cards = source.read()
    finally:
        source.close()
    assert [(str(c.index), c.uuid, c.model, str(c.memory >> 20)) for c in cards] == printed
    minors = {found["uuid"]: int(found["minor"]) for found in _MINOR.finditer(nvidia_smi("-q", "-x"))}
    assert {card.uuid: card.minor for card in cards} == minors
