"""The checkpoint of the kubelet's device manager."""

from pathlib import Path

import pytest

from deviceplugin.kubelet.checkpoint import PodDevicesEntry, read_checkpoint
from playground.kubelet import device_checkpoint
from proto import deviceplugin_pb2 as api


def answer(**parts: object) -> bytes:
    return api.ContainerAllocateResponse(**parts).SerializeToString()  # type: ignore[arg-type]


def test_entries_have_init_containers_and_answers(tmp_path: Path) -> None:
    devices = [api.CDIDevice(name="other.io/x=1"), api.CDIDevice(name="mgpu.io/card=n")]
    entries = [
        device_checkpoint.Entry("u", "i", "r", ("1", "2"), answer(envs={"A": "1"}, cdi_devices=devices)),
        device_checkpoint.Entry("u", "i", "other", ("3",), b""),
        device_checkpoint.Entry("u", "c", "r", ("4",), answer(annotations={"mgpu.io/answer": "m"})),
    ]
    device_checkpoint.write(tmp_path / "checkpoint", entries, {})
    both = read_checkpoint(tmp_path / "checkpoint", "r")
    assert both == [
        PodDevicesEntry("u", "i", frozenset({"1", "2"}), "mgpu.io/card=n", device=True, env={"A": "1"}),
        PodDevicesEntry("u", "c", frozenset({"4"}), "m", device=False),
    ]
    assert read_checkpoint(tmp_path / "checkpoint", "r", frozenset({"2", "1"})) == both[:1]
    assert read_checkpoint(tmp_path / "checkpoint", "r", frozenset({"2"})) == []


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"Data": {}}', '{"Data": {"PodDeviceEntries": [{"ResourceName": "r"}]}}']
)
def test_missing_or_damaged_checkpoint_has_no_entries(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "checkpoint").write_text(text)
    assert read_checkpoint(tmp_path / "checkpoint", "r") == []
