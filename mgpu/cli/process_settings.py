"""Reads the settings of a process from its file, environment and flags.

The commands of the three processes call it first. Flags override the environment, which overrides the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu.model.errors import BadObject, Problem
from mgpu.settings import Settings, load_settings

UNITS = ("GiB", "MiB")
_TOP_LEVEL = ("card_policy", "node_policy")
_ELSEWHERE = {"memory_unit": "dialects.gpushare.memoryUnit"}
"""Flags whose setting is neither at the top level nor in the block of the command."""


def read_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any], block: str = "") -> Settings:
    """Return the settings from a file (or None), the environment and flags.

    Args:
        flags: names of settings as click spells them (`cert_dir`), with their values; None for a flag not given.
        block: the block of the settings that the flags belong to (`webhook`), or "" for the top level. The policies and
            the unit of gpu-mem have places of their own.

    Raises:
        BadObject: with every invalid setting, by its path.
    """
    try:
        text = file.read_text() if file else ""
    except OSError as error:
        raise BadObject([Problem(str(file), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise BadObject([Problem(str(file), "is not text in UTF-8")]) from error
    above = {name for name in flags if not block or name in _TOP_LEVEL}
    paths = {
        _ELSEWHERE.get(name) or (_camel(name) if name in above else f"{block}.{_camel(name)}"): value
        for name, value in flags.items()
    }
    return load_settings(text, str(file or "settings"), environ, paths)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
