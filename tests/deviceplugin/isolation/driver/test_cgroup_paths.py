"""Which folder a container's cgroup has."""

from pathlib import Path

import pytest

from deviceplugin.isolation.driver.cgroup_paths import cgroup_folder

ROOT = Path("/sys/fs/cgroup")
ID = "0123456789abcdef" * 4
UID = "0c8a4b1e_9d2f_4e57_8a3b_1c2d3e4f5a6b"


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        (f"/kubepods/burstable/pod{UID}/{ID}", f"kubepods/burstable/pod{UID}/{ID}"),
        (
            f"kubepods-burstable-pod{UID}.slice:cri-containerd:{ID}",
            f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID}.slice/cri-containerd-{ID}.scope",
        ),
        (f"kubepods-pod{UID}.slice:crio:{ID}", f"kubepods.slice/kubepods-pod{UID}.slice/crio-{ID}.scope"),
        (f"-.slice:crio:{ID}", f"crio-{ID}.scope"),
        ("kubepods.slice::x.slice", "kubepods.slice/x.slice"),
    ],
)
def test_folder_of_either_cgroup_driver(path: str, folder: str) -> None:
    assert cgroup_folder(ROOT, path) == ROOT / folder


@pytest.mark.parametrize("path", ["", "/", "/../../etc", "a/b.slice:crio:x", "/kubepods/../../x"])
def test_path_that_names_no_cgroup_has_no_folder(path: str) -> None:
    assert cgroup_folder(ROOT, path) is None
