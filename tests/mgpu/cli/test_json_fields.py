"""docs/json.md lists exactly the fields that the commands print."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mgpu.cli.inspect import overview_json
from mgpu.cli.kubectl import plugin
from mgpu.cli.top import top_json
from mgpu.cli.top_view import View
from mgpu.model.agent_pods import AgentPod
from mgpu.model.cards import CardState
from mgpu.model.gangs import MGPU, GangName
from mgpu.model.groups import Group, GroupCard
from mgpu.model.pod_constraints import Constraints
from mgpu.model.slice_names import MIG, Slice
from mgpu.presentation.card_views import CardUse, CardView, NodeView, SliceView
from mgpu.presentation.gang_views import GangView, Outlook
from mgpu.presentation.measured_use import CardInUse, ClusterUse, ContainerUse, NodeUse, UnknownUse, Used
from mgpu.presentation.overview import GroupView, Overview
from tests.builders import GIB, card, share
from tests.mgpu.cli.served import served
from tests.scheduler.explained_cluster import add, fill

PAGE = Path(__file__).parents[3] / "docs/json.md"
MAPS = {
    "inspect": {
        "nodes": "NODE",
        "nodes.NODE.annotations": "KEY",
        "accounting": "NODE",
        "gated": "POD",
        "unclear": "OBJECT",
        "dialects": "POD",
        "constraints": "POD",
        "constraints.POD": "KEY",
        "mtgpupods": "POD",
        "agentsNotReady": "NODE",
        "usage": "NODE",
    },
    "top": {"useUnknown": "NODE"},
    "explain": {"constraints": "KEY"},
    "doctor": {},
}
"""For each command the fields that are maps, and what their keys are."""


def documented(command: str) -> set[str]:
    """Return the paths of the page's table. In a row, `.x` takes the place of the last part."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    (text,) = [part for part in section if part.startswith(f"{command}\n")]
    found = set()
    for row in re.findall(r"^\| (`.*?) \|", text, re.M):
        parent = ""
        for name in re.findall(r"`([^`]+)`", row):
            if not name.startswith("."):
                parent = name.rpartition(".")[0]
            found |= prefixes(f"{parent}{name}" if name.startswith(".") else name)
    return found


def prefixes(path: str) -> set[str]:
    """Return the path and the fields in which it lies, such as `a`, `a[]` and `a[].b`."""
    parts = path.split(".")
    paths = {".".join(parts[: i + 1]) for i in range(len(parts))}
    return paths | {found.removesuffix("[]") for found in paths}


def fields(command: str, value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of a document that a command has printed."""
    if isinstance(value, dict):
        for key, part in value.items():
            below = ".".join(filter(None, (path, MAPS[command].get(path, key))))
            yield below
            yield from fields(command, part, below)
    elif isinstance(value, list):
        for part in value:
            yield f"{path}[]"
            yield from fields(command, part, f"{path}[]")


def everything() -> Overview:
    """A cluster where each field has a value, but for MtgpuPods."""
    held = CardUse("ml/train", ("c",), 500, GIB, dialect="mgpu")
    part = SliceView(Slice(1, 0, "1g.10gb"), CardState(card(1)), holder="ml/mig/c")
    half = CardView(CardState(card(0), 500, GIB, 1, gpuid="abcde"), (held,))
    rdma = CardView(CardState(replace(card(0), type="rdma")))
    annotations = {"gpu.partitioning/plan": "1"}
    mig = CardView(CardState(card(1)), (), MIG, (part,))
    return Overview(
        (NodeView("n1", (half, mig), annotations, (rdma,), isolation="mps"),),
        ("ml/waits", "ml/gated"),
        {"Pod ml/odd": "no record"},
        {"ml/waits": Constraints(spread=Group("spread-group", "ml", "web"))},
        (GroupView(Group("spread-group", "ml", "web"), ("ml/train",), (GroupCard("n1", "0"),)),),
        agents_not_ready={"n1": AgentPod("n1", "agent", "CrashLoopBackOff")},
        gated={"ml/gated": ("team/quota",)},
    )


USED = Used(100, GIB)
USE: ClusterUse = {
    "n1": NodeUse((CardInUse(0, "GPU-n1-0", USED),), (ContainerUse("ml/train", "c", 0, "GPU-n1-0", USED, GIB),)),
    "n2": UnknownUse("it does not answer"),
}


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    constrained = share("constrained", 50, 1024, annotations={"mgpu.io/spread-group": "web"})
    with served(tmp_path_factory.mktemp("api"), fill, lambda api: add(api, constrained)) as kubeconfig:
        yield kubeconfig


def output(kubeconfig: str, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(CliRunner().invoke(plugin, [*arguments, "--kubeconfig", kubeconfig, "-o", "json"]).stdout))


def test_fields_of_inspect_are_documented(kubeconfig: str) -> None:
    gang = GangView(GangName(MGPU, "ml", "job"), 3, 1, ("a",), ("b",), Outlook(0, "a", "full"))
    printed = overview_json(everything(), (gang,), {"n1": USE["n1"]})
    found = {*fields("inspect", printed), *fields("inspect", output(kubeconfig, "inspect"))}
    assert found == documented("inspect")


def test_fields_of_top_are_documented() -> None:
    printed = top_json(View("", "core", 20, "", is_wide=False), everything(), USE)
    found = {re.sub(r"^(models|nodes)\[\]\.", "cluster.", path) for path in fields("top", printed)}
    assert found == documented("top")


def test_fields_of_explain_are_documented(kubeconfig: str) -> None:
    found: set[str] = set()
    for name in ("too-large", "malformed", "gated", "mtgpupod/notebook", "constrained"):
        found |= {*fields("explain", output(kubeconfig, "explain", name))}
    assert found == documented("explain")


def test_fields_of_doctor_are_documented(kubeconfig: str) -> None:
    assert {*fields("doctor", output(kubeconfig, "doctor"))} == documented("doctor")
