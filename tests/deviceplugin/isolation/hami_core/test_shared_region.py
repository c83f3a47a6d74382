"""The file in which HAMi-core keeps the limits and the use of a container."""

import os
from pathlib import Path

import pytest

from deviceplugin.isolation.hami_core.shared_region import SIZE, CardUse, UnknownRegion, read_region, write_limits
from tests.builders import GIB
from tests.deviceplugin.isolation.hami_core.region import Region, add_process, region


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "region.cache"


def test_use_is_the_sum_over_the_processes(file: Path) -> None:
    made = region("GPU-a", "GPU-b", limit=4 * GIB)
    add_process(made, 7, 0, GIB, sm=30)
    add_process(made, 8, 0, 2 * GIB, sm=20)
    add_process(made, 8, 1, 5)
    add_process(made, 0, 0, 99 * GIB)  # a slot of an ended process
    file.write_bytes(bytes(made) + b"\0")
    assert read_region(file) == {"GPU-a": CardUse(3 * GIB, 50, 4 * GIB), "GPU-b": CardUse(5, 0, 4 * GIB)}


def test_limits_are_changed_in_place(file: Path) -> None:
    made = region("GPU-a", "GPU-b", limit=GIB)
    file.write_bytes(bytes(made))
    write_limits(file, {"GPU-b": 3 * GIB})
    after = Region.from_buffer_copy(file.read_bytes())
    assert [*after.limit][:3] == [GIB, 3 * GIB, 0]
    made.limit[1] = 3 * GIB
    assert bytes(after) == bytes(made), "nothing else changes"
    with pytest.raises(UnknownRegion, match="has not seen card GPU-c"):
        write_limits(file, {"GPU-a": 1, "GPU-c": 1})
    assert read_region(file)["GPU-a"].limit == GIB


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no process has used the library yet"),
        (bytes(SIZE), "no process has used the library yet"),
        (bytes(region("GPU-a"))[:-1], "no process has used the library yet, or its layout is not known"),
        (bytes(Region(initialized=19920718, major=1, minor=1)), "has the layout 1.1, and only 1.2 is known"),
    ],
)
def test_other_content_is_unknown(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    with pytest.raises(UnknownRegion, match=reason):
        read_region(file)
    with pytest.raises(UnknownRegion, match=reason):
        write_limits(file, {"GPU-a": 1})


def test_what_a_container_puts_in_place_of_the_file_is_not_followed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(region("GPU-a")))
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(UnknownRegion, match="cannot be opened"):
        read_region(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UnknownRegion):
        read_region(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UnknownRegion):
        write_limits(file, {})


def test_numbers_from_the_container_cost_no_more_than_the_structure_has(file: Path) -> None:
    made = region("GPU-a")
    made.proc_num = 2**31 - 1
    file.write_bytes(bytes(made))
    assert read_region(file) == {"GPU-a": CardUse(0, 0, 0)}
    made.proc_num = -1
    file.write_bytes(bytes(made))
    assert read_region(file) == {"GPU-a": CardUse(0, 0, 0)}
