"""The files with the limits of the MtgpuPods of a card, for isolation back ends."""

import ctypes
import io
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.isolation import limits_files
from deviceplugin.isolation.limits_files import LimitsFiles, format_limits
from deviceplugin.pods.gpu_pod import LimitedPod, read_limited
from tests.builders import card, cards
from tests.deviceplugin.mtgpu import GIB, pod_of
from tests.waiting import until

CARD = "GPU-n1-1"
IN_CLOSE_WRITE = 0x8


def limited(name: str, on: str = CARD, request: str = "0.2", limit: str = "1.0", **more: Any) -> LimitedPod:
    found = read_limited(pod_of(name, on, request, limit, **more))
    assert found is not None
    return found


class Place:
    """A node with two cards, and its folder of limits files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder / "limits", folder / "limits" / CARD
        self.pods: list[LimitedPod] = []
        self.synced = True
        self.gpus = cards(2)
        self.warnings: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.files = LimitsFiles(str(self.folder), self, self, self, self.warnings.append)

    def limited_pods(self) -> list[LimitedPod]:
        return self.pods

    def write(self, *pods: LimitedPod) -> str:
        """Return the content of the file for these pods; "" where there is no file."""
        self.pods = list(pods)
        self.files.write()
        return self.file.read_text() if self.file.exists() else ""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_content_is_the_count_and_a_line_for_each_pod_in_total_order() -> None:
    rows = [limited("b"), limited("a", request="0.30", limit="1", memory=1), limited("c", namespace="a", request="0")]
    expected = f"3\na/c 0 1 {GIB}\ndefault/a 0.3 1 1\ndefault/b 0.2 1 {GIB}\n"
    assert {format_limits(rows), format_limits(rows[::-1])} == {expected.encode()}
    assert format_limits([]) == b"0\n"


@pytest.mark.parametrize("text", ["0.001", "0.125", "0.2", "0.999", "1"])
def test_decimals_are_as_short_as_possible(text: str) -> None:
    assert format_limits([limited("p", request=text, limit="1.000")]).split()[2:4] == [text.encode(), b"1"]


def test_file_stays_and_has_zero_lines_after_the_last_pod(place: Place) -> None:
    assert place.write() == ""
    assert not place.folder.exists(), "a node without MtgpuPods has no such folder"
    assert place.write(limited("a"), limited("other", "GPU-n1-0")) == f"1\ndefault/a 0.2 1 {GIB}\n"
    inode = place.file.stat().st_ino
    assert place.write(limited("a"), limited("b")) == f"2\ndefault/a 0.2 1 {GIB}\ndefault/b 0.2 1 {GIB}\n"
    assert place.write() == "0\n"
    assert place.file.stat().st_ino == inode
    assert sorted(file.name for file in place.folder.iterdir()) == ["GPU-n1-0", CARD]


def test_files_of_an_earlier_agent_are_corrected(place: Place) -> None:
    place.write(limited("a"))
    place.restart()
    assert place.write() == "0\n"
    place.file.write_text("")
    assert place.write() == "0\n", "an agent ended between making and writing it"
    place.file.write_text("1\ndefault/a 0.2 1 1\nleft behind\n")
    assert place.write(limited("a", memory=1)) == "1\ndefault/a 0.2 1 1\n"


def test_foreign_change_of_a_file_is_corrected_after_the_interval(place: Place) -> None:
    right = place.write(limited("a"))
    files = LimitsFiles(str(place.folder), place, place, place, place.warnings.append, 0.01)
    place.file.write_text("7\n")
    files.start()
    try:
        until(lambda: place.file.read_text() == right)
        place.file.write_text("")
        until(lambda: place.file.read_text() == right)
    finally:
        files.stop()


def test_nothing_is_written_before_all_pods_are_known(place: Place) -> None:
    before = place.write(limited("a"))
    place.synced = False
    assert place.write() == before
    assert place.file.read_text() == before


@pytest.mark.parametrize("named", ["../../outside", "/etc/mgpu-test", "..", "GPU-of-another-node", "GPU-n1-0,GPU-n1-1"])
def test_only_cards_of_the_node_become_files(place: Place, named: str) -> None:
    place.write(limited("a", named), limited("b", "GPU-n1-0"))
    assert [file.name for file in place.folder.iterdir()] == ["GPU-n1-0"]
    assert not (place.folder.parent.parent / "outside").exists()


def test_card_whose_uuid_is_a_path_gets_no_file(place: Place) -> None:
    place.gpus = (card(0), *(type(card())(i, uuid, "", GIB) for i, uuid in ((1, "../up"), (2, ".."), (3, "a/b"))))
    place.write(*(limited(f"p{one.index}", one.uuid) for one in place.gpus))
    assert [file.name for file in place.folder.iterdir()] == ["GPU-n1-0"]
    assert not (place.folder.parent / "up").exists()


def test_nothing_is_written_through_a_link(place: Place, tmp_path: Path) -> None:
    place.folder.mkdir()
    target = tmp_path / "target"
    target.write_text("precious")
    place.file.symlink_to(target)
    place.write(limited("a"))
    assert target.read_text() == "precious"
    assert len(place.warnings) == 1


def test_failed_write_is_reported_once_and_retried(place: Place) -> None:
    place.folder.write_text("a file where the folder belongs")
    place.write(limited("a"))
    place.write(limited("a"), limited("b"))
    (warned,) = place.warnings
    assert warned.startswith("the limits of MtgpuPods on card 0 cannot be written: ")
    place.folder.unlink()
    assert place.write(limited("a")).startswith("1\n")
    place.file.unlink()
    place.file.mkdir()
    place.pods = [limited("a"), limited("b", "GPU-n1-0")]
    place.files.write()
    assert (place.folder / "GPU-n1-0").read_text() == f"1\ndefault/b 0.2 1 {GIB}\n", "the other card's is written"
    assert len(place.warnings) == 2


def test_without_a_folder_nothing_is_written_and_nothing_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder.parent)
    files = LimitsFiles("", place, place, place, place.warnings.append)
    place.pods = [limited("a")]
    files.start()
    files.write()
    files.stop()
    assert not list(place.folder.parent.iterdir())
    assert not place.warnings


@pytest.fixture
def closed(place: Place) -> Iterator[Callable[[], list[str]]]:
    """Watch the folder as a back end does: return the files that a writer has closed since the last call."""
    place.folder.mkdir()
    libc = ctypes.CDLL(None)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(descriptor, os.fsencode(place.folder), IN_CLOSE_WRITE) >= 0

    def names() -> list[str]:
        found: list[str] = []
        try:
            told = os.read(descriptor, 4096)
        except BlockingIOError:
            return found
        while told:
            size = struct.unpack_from("iIII", told)[3]
            found.append(told[16 : 16 + size].rstrip(b"\0").decode())
            told = told[16 + size :]
        return found

    yield names
    os.close(descriptor)


def test_watcher_gets_one_event_for_each_change(place: Place, closed: Callable[[], list[str]]) -> None:
    place.write(limited("a"))
    assert closed() == [CARD]
    place.write(limited("a"))
    assert closed() == []
    place.write(limited("a"), limited("b"))
    assert closed() == [CARD]
    place.write()
    assert closed() == [CARD]


A, B, LONG = limited("a"), limited("b", request="0.25"), limited("a", request="0.125", limit="0.375")
CROWD = [limited(f"p{i:03}") for i in range(200)]


@pytest.mark.parametrize(
    ("before", "after"),
    [([], [A]), ([A], []), ([A], [A, B]), ([A, B], [B]), ([A], [LONG]), ([B], [A, *CROWD]), (CROWD, [A, *CROWD[7:]])],
    ids=["first", "last", "joins", "leaves", "longer", "a crowd comes", "a crowd changes"],
)
def test_reader_in_the_middle_of_a_change_finds_all_counted_lines(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: list[LimitedPod], after: list[LimitedPod]
) -> None:
    """The file is read after each write to the kernel, as by a reader, or after the agent was killed there."""
    place.write(A)
    place.write(*before)
    seen: list[list[str]] = []

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            at, size = self.tell(), os.fstat(self.fileno()).st_size
            assert at >= size or at + len(data) <= size, "the kernel shows what is longer last: the count before lines"
            return self._seen(super().write(data))

        def truncate(self, size: int | None = None) -> int:
            return self._seen(super().truncate(size))

        def _seen(self, result: int) -> int:
            count, *lines = place.file.read_text().split("\n")
            seen.append(lines[: int(count)])
            return result

    monkeypatch.setattr(limits_files, "open", lambda fd, _: io.BufferedWriter(Raw(fd, "w")), raising=False)
    place.write(*after)
    whole = [format_limits(rows).decode().split("\n")[1:-1] for rows in (before, after)]
    assert seen
    assert all(lines in whole for lines in seen)
    assert seen[-1] == whole[1]
