"""Mounts and device nodes that name a container's cards in addition to NVIDIA_VISIBLE_DEVICES."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.delivery.visibility import Exposure, make_exposure, read_toolkit
from deviceplugin.plugin.plugin_server import DeviceList, Plugin
from deviceplugin.pods.identity import Refused
from mgpu.model.node_slices import NodeSlices, slice_devices
from mgpu.model.slice_names import Slice
from mgpu.settings import load_settings
from mgpu.version import Toolkit
from playground.container_runtime import Edits, resolve
from proto import deviceplugin_pb2 as api
from tests.builders import CORE, card, pod
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.node import Node
from tests.deviceplugin.partitioning.rig import place, slice_pod
from tests.deviceplugin.records import decided, recorded, requesting

IDS = ["1", "2"]
LIST = "/var/run/nvidia-container-devices"
MINORS = (replace(card(0), minor=3), replace(card(1), minor=7))
"""The cards of a node, whose minor numbers differ from their indexes."""


def dev(folder: Path, *names: str) -> Path:
    """Create a /dev with these entries. They are plain files, since only root can create device nodes."""
    root = folder / "dev"
    root.mkdir()
    for name in names:
        (root / name).touch()
    return root


def started(fake_node: FakeNode, raw: dict[str, Any], resource: str = CORE) -> Edits:
    """Start the pod's container, and return the edits that the runtime applies."""
    fake_node.pods.take(raw)
    answer = fake_node.admit(IDS, raw["metadata"]["uid"], resource=resource)
    assert not answer.mounts
    assert not answer.nodes
    fake_node.start(IDS, resource=resource)
    return resolve(answer.cdi, fake_node.folder / "cdi")


def test_default_exposure_is_the_variable_alone(tmp_path: Path) -> None:
    edits = started(FakeNode(tmp_path), decided("p", "1"))
    assert (edits.env["NVIDIA_VISIBLE_DEVICES"], edits.mounts, edits.nodes) == ("GPU-n1-1", (), ())


def test_exposure_by_mounts_names_every_card(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, exposure=Exposure(mounts=True))
    edits = started(fake_node, recorded(pod("p", requesting("c", {"nvidia.com/gpu": 1})), {"c": 1}), "nvidia.com/gpu")
    assert edits.mounts == ((f"{LIST}/GPU-n1-1", "/dev/null"),)
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert edits.nodes == ()


def test_mig_devices_have_their_own_mounts_and_the_node_of_their_card(tmp_path: Path) -> None:
    root = dev(tmp_path, "nvidia3", "nvidia7")
    fake_node = FakeNode(tmp_path, exposure=Exposure(mounts=True, nodes=True, dev=root))
    made = [Slice(0, place(text).start, "1g.10gb", f"MIG-{text}") for text in ("1g.10gb@4", "1g.10gb@5")]
    fake_node.all_gpus, fake_node.cards = (
        MINORS,
        (MINORS[1], *slice_devices(NodeSlices("mig", existing=tuple(made)), MINORS)),
    )
    raw = slice_pod("p", *made, phase="Pending")
    raw["spec"]["containers"] = [requesting("c", {"nvidia.com/mig-1g.10gb": 2})]
    edits = started(fake_node, raw, "nvidia.com/mig-1g.10gb")
    assert edits.mounts == tuple((f"{LIST}/MIG-1g.10gb@{start}", "/dev/null") for start in (4, 5))
    assert edits.nodes == ("/dev/nvidia3",)


def test_mps_share_has_the_mount_and_node_of_its_card(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, exposure=Exposure(mounts=True, nodes=True, dev=dev(tmp_path, "nvidia3", "nvidia7")))
    fake_node.all_gpus, fake_node.cards = (
        MINORS,
        (MINORS[1], *slice_devices(NodeSlices("mps", existing=(place("4gb@3"),)), MINORS)),
    )
    edits = started(fake_node, slice_pod("p", place("4gb@3"), phase="Pending"), "nvidia.com/gpu-4gb")
    assert edits.mounts == ((f"{LIST}/GPU-n1-0", "/dev/null"),)
    assert edits.nodes == ("/dev/nvidia3",)


def test_device_nodes_are_those_of_the_cards_and_the_existing_driver_nodes(tmp_path: Path) -> None:
    fake_node = FakeNode(
        tmp_path, exposure=Exposure(nodes=True, dev=dev(tmp_path, "nvidia3", "nvidia7", "nvidiactl", "null"))
    )
    fake_node.cards = MINORS
    edits = started(fake_node, decided("p", "1"))
    assert (edits.nodes, edits.mounts) == (("/dev/nvidia7", "/dev/nvidiactl"), ())
    (file,) = (tmp_path / "cdi").iterdir()
    (node, _) = json.loads(file.read_text())["devices"][0]["containerEdits"]["deviceNodes"]
    assert node == {"path": "/dev/nvidia7", "permissions": "rw"}


@pytest.mark.parametrize(
    ("minor", "why"),
    [(7, "no device node .*/dev/nvidia7"), (None, "no known minor number")],
)
def test_missing_device_node_is_refused(tmp_path: Path, minor: int | None, why: str) -> None:
    fake_node = FakeNode(tmp_path, exposure=Exposure(nodes=True, dev=dev(tmp_path, "nvidia3", "nvidiactl")))
    fake_node.cards = (MINORS[0], replace(card(1), minor=minor))
    said = rf"default/p container c: card 1 \(GPU-n1-1\) has {why}, which deviceplugin.deviceNodes requires"
    with pytest.raises(Refused, match=said):
        started(fake_node, decided("p", "1"))
    assert [name for name, _ in fake_node.refusals] == ["p"]
    assert not (tmp_path / "cdi").exists()


def test_only_the_carrier_brings_mounts_and_nodes(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, exposure=Exposure(mounts=True))
    names = ("koordinator.sh/gpu-core", "koordinator.sh/gpu-memory-ratio")
    fake_node.pods.take(recorded(pod("p", requesting("c", dict.fromkeys(names, 2))), {"c": 1}))
    answers = [fake_node.admit(IDS, "uid-p", resource=name) for name in names]
    for name in names:
        fake_node.start(IDS, resource=name)
    own, other = (resolve(answer.cdi, tmp_path / "cdi") for answer in answers)
    assert own.mounts
    assert (other.mounts, other.nodes) == ((), ())


def test_answer_without_cdi_has_mounts_and_nodes(tmp_path: Path) -> None:
    exposure = Exposure(mounts=True, nodes=True, dev=dev(tmp_path, "nvidia7", "nvidia-uvm"))
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.01, exposure=exposure)
    fake_node.cards = MINORS
    fake_node.pods.take(decided("q", "0"))
    fake_node.pods.take(decided("p", "1"))

    async def allocate() -> api.AllocateResponse:
        fake_node.changed.bind()
        asked = api.ContainerAllocateRequest(devices_ids=IDS)
        return await Plugin(CORE, fake_node.allocator, DeviceList()).Allocate(
            api.AllocateRequest(container_requests=[asked]), None
        )

    (answer,) = asyncio.run(allocate()).container_responses
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1", "q's card has no node here"
    assert [(m.host_path, m.container_path) for m in answer.mounts] == [("/dev/null", f"{LIST}/GPU-n1-1")]
    wanted = [(path, path, "rw") for path in ("/dev/nvidia7", "/dev/nvidia-uvm")]
    assert [(d.host_path, d.container_path, d.permissions) for d in answer.devices] == wanted


def test_exposure_follows_the_settings() -> None:
    own = load_settings("deviceplugin: {deviceList: Mounts, deviceNodes: true, devDir: /host/dev}").deviceplugin
    assert make_exposure(own) == Exposure(mounts=True, nodes=True, dev=Path("/host/dev"))
    assert make_exposure(load_settings().deviceplugin) == Exposure()
    environ = {"MGPU_DEVICEPLUGIN__DEVICELIST": "mounts", "MGPU_DEVICEPLUGIN__DEVICENODES": "true"}
    assert make_exposure(load_settings(environ=environ).deviceplugin) == Exposure(mounts=True, nodes=True)


def test_agent_exposes_cards_as_its_settings_say(node: Node) -> None:
    with node.agent(deviceList="mounts"):
        node.create(decided("p", "1", node="n1"))
        node.runs("p")
        (file,) = node.cdi_files()
        assert f"{LIST}/GPU-n1-1" in file.read_text()
        assert node.visible("p") == "GPU-n1-1"


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
def test_toolkit_configured_reports_what_it_accepts(tmp_path: Path, text: str, wanted: Toolkit | None) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert read_toolkit(file) == wanted


def test_toolkit_without_configuration_is_unknown(tmp_path: Path) -> None:
    assert read_toolkit(tmp_path / "config.toml") is None
