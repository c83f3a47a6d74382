"""What NVIDIA's container toolkit is configured to heed."""

from pathlib import Path

import pytest

from deviceplugin.delivery.visibility import read_toolkit
from mgpu.version import Toolkit

VARIABLE = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", Toolkit(variable=True, mounts=False)),
        (f"#{VARIABLE} = false\n[nvidia-container-cli]\nldconfig = '@/sbin/ldconfig'", Toolkit(True, False)),
        (f"{VARIABLE} = false\n{MOUNTS} = true", Toolkit(variable=False, mounts=True)),
        (f"{VARIABLE} = false", Toolkit(variable=False, mounts=False)),
        ("not toml", None),
    ],
)
def test_what_its_configuration_says(tmp_path: Path, text: str, wanted: Toolkit | None) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert read_toolkit(file) == wanted


def test_where_it_is_not_there(tmp_path: Path) -> None:
    assert read_toolkit(tmp_path / "config.toml") is None
