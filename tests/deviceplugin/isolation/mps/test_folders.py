"""The folders that containers can write to are limited and emptied, and no link in them is followed."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deviceplugin.isolation.mps.folders import UnlimitedFolder, empty, propagates_to_node, remove_links
from deviceplugin.pods.identity import Refused
from tests.deviceplugin.isolation.mps.fake import CARD, OTHER, kill, on_loop, pid_of, ready, serving, until

SHARED = "601 600 0:22 /mgpu /run/mgpu rw,nosuid shared:5 master:3 - tmpfs tmpfs rw"
SLAVE = "601 600 0:22 /mgpu /run/mgpu rw,nosuid master:5 - tmpfs tmpfs rw"
ROOT = "600 1 0:40 / / rw shared:1 - overlay overlay rw"


class FakeMounts:
    """Folders that count as mounts. `allowed` is whether more folders can be mounted."""

    def __init__(self, *own: Path, allowed: bool = True) -> None:
        self.own, self.allowed = {*own}, allowed

    def is_mount(self, folder: Path) -> bool:
        return folder in self.own

    def mount(self, folder: Path) -> None:
        if not self.allowed:
            raise UnlimitedFolder(f"{folder} is not a separate mount")
        self.own.add(folder)


def leave(folder: Path, outside: Path) -> None:
    """Create what a root container can create: links, nested folders, many files, a folder with a socket's name."""
    folder.mkdir(parents=True, exist_ok=True)
    outside.mkdir(exist_ok=True)
    (outside / "kept").write_text("of the node")
    (folder / "to-folder").symlink_to(outside)
    (folder / "control_lock").symlink_to(outside / "kept")
    (folder / "control").mkdir()
    (folder / "control" / "link").symlink_to(outside)
    os.mkfifo(folder / "fifo")
    for number in range(1200):
        (folder / f"f{number}").touch()


def test_empty_removes_everything_and_follows_no_link(folder: Path) -> None:
    leave(folder / "pipe", folder / "outside")
    empty(folder / "pipe")
    assert list((folder / "pipe").iterdir()) == []
    assert (folder / "outside" / "kept").read_text() == "of the node"


def test_empty_refuses_a_folder_that_is_a_link(folder: Path) -> None:
    (folder / "outside").mkdir()
    (folder / "outside" / "kept").touch()
    (folder / "pipe").symlink_to(folder / "outside")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        empty(folder / "pipe")
    assert (folder / "outside" / "kept").exists()


def test_empty_removes_a_chain_of_folders_longer_than_paths_and_stacks_can_be(folder: Path) -> None:
    (folder / "pipe").mkdir()
    at = os.open(folder / "pipe", os.O_DIRECTORY)
    for _ in range(1200):
        os.mkdir("d" * 20, dir_fd=at)
        below = os.open("d" * 20, os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    empty(folder / "pipe")
    assert list((folder / "pipe").iterdir()) == []


def test_empty_ends_where_there_is_more_than_one_attempt_removes(folder: Path) -> None:
    for number in range(10):
        (folder / str(number)).touch()
    with pytest.raises(OSError, match="more files and folders than one attempt removes"):
        empty(folder, limit=5)
    empty(folder, limit=5)
    assert list(folder.iterdir()) == []


def test_remove_links_leaves_sockets_and_files(folder: Path) -> None:
    (folder / "control").touch()
    (folder / "nvidia-cuda-mps-control.pid").symlink_to("/etc/passwd")
    remove_links(folder)
    assert [entry.name for entry in folder.iterdir()] == ["control"]


@pytest.mark.parametrize(
    ("lines", "reaches"),
    [
        ([ROOT, SHARED], True),
        ([ROOT, SLAVE], False),
        ([ROOT], True),
        ([ROOT, SHARED, SLAVE], False),
        ([ROOT, SLAVE, "602 600 0:23 / /run/mgpu/mps/G rw shared:9 - tmpfs t rw"], False),
        ([ROOT, SLAVE, "602 601 0:23 / /run/mgpu/mps rw shared:9 - tmpfs t rw"], True),
    ],
)
def test_reaches_node_follows_the_propagation_of_the_innermost_mount(lines: list[str], reaches: bool) -> None:
    assert propagates_to_node("\n".join(lines), Path("/run/mgpu/mps/GPU-0/pipe")) is reaches


@on_loop
async def test_leftovers_of_ended_containers_are_gone_before_a_daemon_starts(folder: Path) -> None:
    leave(folder / CARD / "pipe", folder / "outside")
    leave(folder / "shm", folder / "outside")
    async with serving(folder, []) as daemons:
        daemons.set_needed({CARD}, ())
        await ready(daemons)
    left = {entry.name for entry in (folder / CARD / "pipe").iterdir()}
    assert left == {"control", "control_lock", "nvidia-cuda-mps-control.pid"}
    assert list((folder / "shm").iterdir()) == []
    assert (folder / "outside" / "kept").read_text() == "of the node"


@on_loop
async def test_daemon_with_clients_starts_again_beside_their_files_without_links(folder: Path) -> None:
    pipe = folder / CARD / "pipe"
    async with serving(folder, []) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        for file in (pipe / "of-a-client", folder / "shm" / "of-a-client"):
            file.touch()
        (pipe / "link").symlink_to("/etc/passwd")
        before = pid_of(folder)
        kill(before)
        await until(lambda: not daemons.is_healthy(CARD))
        await ready(daemons)
        assert pid_of(folder) != before
    assert (pipe / "of-a-client").exists()
    assert (folder / "shm" / "of-a-client").exists()
    assert not (pipe / "link").is_symlink()


@on_loop
async def test_shared_memory_is_freed_when_the_last_daemon_ends_and_not_before(folder: Path) -> None:
    shared = folder / "shm" / "left"
    async with serving(folder, []) as daemons:
        daemons.set_needed({CARD, OTHER}, {OTHER})
        await ready(daemons)
        await ready(daemons, OTHER)
        shared.write_text("x")
        daemons.set_needed({OTHER}, {OTHER})
        await until(lambda: not daemons.is_healthy(CARD))
        daemons.set_needed({CARD, OTHER}, {OTHER})
        await ready(daemons)
        assert shared.exists()
        daemons.set_needed((), ())
        await until(lambda: not shared.exists())


@on_loop
async def test_daemon_does_not_start_in_folders_without_a_bound(folder: Path) -> None:
    warnings: list[str] = []
    mounts = FakeMounts(allowed=False)
    async with serving(folder, warnings, mounts=mounts) as daemons:
        daemons.set_needed({CARD}, ())
        await until(lambda: warnings)
        with pytest.raises(Refused, match=r"shm is not a separate mount, .* init container"):
            await ready(daemons, seconds=0.01)
        mounts.own.add(folder / "shm")
        await until(lambda: "pipe is not a separate mount" in warnings[-1])
        assert daemons.has_unlimited_folder()
        mounts.allowed = True
        await ready(daemons)
        assert not daemons.has_unlimited_folder()
    assert mounts.own == {folder / "shm", folder / CARD / "pipe"}


@on_loop
async def test_daemon_of_an_older_manifest_continues_for_its_clients_and_is_reported(folder: Path) -> None:
    warnings: list[str] = []
    mounts = FakeMounts()
    async with serving(folder, warnings) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
    async with serving(folder, warnings, mounts=mounts) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        assert daemons.has_unlimited_folder()
        kill(pid_of(folder))
        await until(lambda: not daemons.is_healthy(CARD))
        await ready(daemons)
        assert mounts.own == set(), "running containers would not see a new mount over the folder"


@on_loop
async def test_idle_daemon_starts_again_when_ended_containers_left_its_folder_crowded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = folder / CARD / "pipe"
    real, warnings = os.statvfs, list[str]()

    def statvfs(path: Path) -> os.statvfs_result:
        found = list(real(path))
        found[2], found[3] = 4, 1 if (pipe / "left").exists() else 4
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    async with serving(folder, warnings, mounts=FakeMounts(folder / "shm")) as daemons:
        daemons.set_needed({CARD}, ())
        await ready(daemons)
        daemons.set_needed({CARD}, {CARD})
        before = pid_of(folder)
        (pipe / "left").touch()
        await asyncio.sleep(0.2)
        assert pid_of(folder) == before, "a client may need what is there"
        daemons.set_needed({CARD}, ())
        await until(lambda: not (pipe / "left").exists())
        await ready(daemons)
        assert pid_of(folder) != before
    assert len(warnings) == 1
    assert "its folder was more than half full" in warnings[0]


IN_A_NAMESPACE = """
import os, sys
from pathlib import Path
from deviceplugin.isolation.mps.folders import KernelMounts, UnlimitedFolder
folder, mounts = Path(sys.argv[1]), KernelMounts()
folder.mkdir(parents=True)
os.system("mount --make-rprivate /")
try:
    mounts.mount(folder)
except UnlimitedFolder as error:
    assert "does not propagate to the node" in str(error)
assert not mounts.is_mount(folder)
os.system("mount --make-shared /")
mounts.mount(folder)
assert mounts.is_mount(folder)
print(next(line for line in open("/proc/self/mountinfo") if line.split()[4] == str(folder)))
try:
    (folder / "fill").write_bytes(bytes(8 << 20))
    sys.exit("8 MiB fit")
except OSError as error:
    assert error.strerror == "No space left on device"
(folder / "fill").unlink()
for number in range(2000):
    try:
        (folder / str(number)).touch()
    except OSError as error:
        assert error.strerror == "No space left on device"
        break
else:
    sys.exit("2000 files fit")
(folder / "0").unlink()
(folder / "0").symlink_to("/etc/passwd")
try:
    open(folder / "0")
    sys.exit("the link was followed")
except OSError as error:
    assert error.strerror == "Too many levels of symbolic links", error
"""


def test_pipe_folders_mount_has_bounds_and_follows_no_link(folder: Path) -> None:
    unshare = ["unshare", "--mount", "--propagation", "slave"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs CAP_SYS_ADMIN, which this user does not have")
    command = [*unshare, sys.executable, "-c", IN_A_NAMESPACE, str(folder / CARD / "pipe")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rw,nosuid,nodev,noexec" in done.stdout
    assert "size=4096k,nr_inodes=1024" in done.stdout
