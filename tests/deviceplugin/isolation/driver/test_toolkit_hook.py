"""The hook of NVIDIA's container toolkit: whether the node has it, and how it is called."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin.delivery.cdi import Edits, Hook
from deviceplugin.isolation.driver.toolkit_hook import ToolkitHook, find_hook, hook_edits
from deviceplugin.isolation.limits import CardLimit
from tests.builders import GIB, cards

FIRST, SECOND = cards(2)
HOOK = ToolkitHook("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook",), "/run/nvidia/driver")
ARGS = ["nvidia-ctk", "hook", "apply-cuda-memory-limits", "--driver-root", "/d", "--gpu-id", "GPU-0"]


def spec(args: Any, *, in_device: bool = True) -> dict[str, Any]:
    edits = {"hooks": [{"hookName": "createRuntime", "path": "/usr/bin/nvidia-ctk", "args": args}]}
    device = {"name": "all", "containerEdits": edits if in_device else {}}
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [device],
        "containerEdits": {} if in_device else edits,
    }


@pytest.mark.parametrize("in_device", [True, False])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_hook_is_taken_from_the_specs_of_the_toolkit(tmp_path: Path, suffix: str, in_device: bool) -> None:
    text = json.dumps(spec(ARGS, in_device=in_device))
    content = text if suffix == "json" else yaml.safe_dump(json.loads(text))
    (tmp_path / f"nvidia.{suffix}").write_text(content)
    assert find_hook("auto", [tmp_path / "none", tmp_path]) == ToolkitHook(
        "/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook"), "/d"
    )
    assert find_hook("none", [tmp_path]) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '"apply-cuda-memory-limits"',
        json.dumps(spec(["nvidia-ctk", "hook", "update-ldcache"])),
        json.dumps(spec("apply-cuda-memory-limits")),
        json.dumps({"devices": [7], "containerEdits": {"hooks": "apply-cuda-memory-limits"}}),
        json.dumps({"devices": {"apply-cuda-memory-limits": 1}}),
    ],
)
def test_other_files_have_no_hook(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert find_hook("auto", [tmp_path]) is None


def test_specs_of_mgpu_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "mgpu_uid_c_0.json").write_text(json.dumps(spec(ARGS)))
    assert find_hook("auto", [tmp_path]) is None


@pytest.mark.parametrize(
    ("path", "args"),
    [("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook",)), ("/opt/nvidia-ctk", ("nvidia-ctk", "hook"))],
)
def test_hook_of_the_setting(path: str, args: tuple[str, ...]) -> None:
    assert find_hook(path, []) == ToolkitHook(path, args)


def test_hook_limits_all_cards_and_reserves_nothing() -> None:
    limits = (CardLimit(FIRST, 2 * GIB + 7, 300), CardLimit(SECOND, 2 * GIB, None))
    call = ("nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", "/run/nvidia/driver")
    gpus = ("--gpu-id", FIRST.uuid, "--gpu-id", SECOND.uuid)
    assert hook_edits(HOOK, limits) == Edits(
        {"NVIDIA_GPU_MEMORY_REQUEST": "0", "NVIDIA_GPU_MEMORY_LIMIT": "2048"},
        hooks=(Hook("createRuntime", HOOK.path, (*call, *gpus)),),
    )


@pytest.mark.parametrize(
    "limits",
    [
        (CardLimit(FIRST, 2 * GIB, None), CardLimit(SECOND, GIB, None)),
        (CardLimit(FIRST, 2 * GIB, None), CardLimit(SECOND, None, 500)),
        (CardLimit(FIRST, None, 500),),
    ],
)
def test_hook_is_not_called_for_limits_that_it_cannot_set(limits: tuple[CardLimit, ...]) -> None:
    assert hook_edits(HOOK, limits) is None
