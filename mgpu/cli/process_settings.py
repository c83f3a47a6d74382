"""Reads the settings of a process from its file, its environment and its flags.

Flags override the environment, and the environment overrides the file. All processes call `read_settings`, and so do
the commands that have the option --config. A flag has the name of its setting, in snake case; `_setting_path` derives
the path of the setting from it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu.model.errors import BadObject, Problem
from mgpu.settings import Settings, load_settings

UNITS = ("GiB", "MiB")
_TOP_LEVEL = ("card_policy", "node_policy")
_ELSEWHERE = {"memory_unit": "dialects.gpushare.memoryUnit"}
"""The path of the setting for each flag whose setting is neither at the top level nor in the block of the command."""


def read_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any], block: str = "") -> Settings:
    """Return the settings from a file, the environment and the flags.

    Args:
        flags: the values of the flags, by the names that click gives them (`cert_dir`). The value of a flag that is not
            set is None.
        block: the block of the settings to which the flags belong, such as `webhook`; "" for the top level. The flags
            for policies and for the unit of gpu-mem do not belong to a block.

    Raises:
        BadObject: with the path of every invalid setting, or with the path of a file that cannot be read.
    """
    try:
        text = file.read_text() if file else ""
    except OSError as error:
        raise BadObject([Problem(str(file), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise BadObject([Problem(str(file), "is not text in UTF-8")]) from error
    paths = {_setting_path(name, block): value for name, value in flags.items()}
    return load_settings(text, str(file or "settings"), environ, paths)


def _setting_path(flag: str, block: str) -> str:
    if flag in _ELSEWHERE:
        return _ELSEWHERE[flag]
    return _camel_case(flag) if not block or flag in _TOP_LEVEL else f"{block}.{_camel_case(flag)}"


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
