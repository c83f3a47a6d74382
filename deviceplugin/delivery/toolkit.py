"""What NVIDIA's container toolkit heeds of unprivileged containers, as its configuration on the node says."""

import logging
import tomllib
from pathlib import Path

from mgpu.version import Toolkit

log = logging.getLogger(__name__)

CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
_VARIABLE = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


def read_toolkit(file: Path = CONFIG) -> Toolkit | None:
    """None: the file is not there, or not seen from here, or cannot be read.

    What it leaves out is as nvidia-container-toolkit has it (internal/config, GetDefault): the variable alone.
    """
    try:
        found = tomllib.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s: %s", file, error)
        return None
    return Toolkit(found.get(_VARIABLE, True) is True, found.get(_MOUNTS, False) is True)
