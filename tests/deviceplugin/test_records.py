"""Records that are written back, behind everything else."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deviceplugin.pods import GpuPod, read_gpu_pod
from deviceplugin.records import RecordWriter
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.settings import load_settings
from tests.builders import share
from tests.waiting import until


class FakeApi(Api):
    """Answers as told, one after the other, then well."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.patches = list(errors), list[tuple[str, Any]]()
        self.go_on = threading.Event()
        self.go_on.set()

    def patch(self, path: str, body: object, *_: Any, **__: Any) -> dict[str, Any]:
        self.go_on.wait(60)
        self.patches.append((path, body))
        if self.errors:
            raise self.errors.pop(0)
        return {}


def known(name: str) -> GpuPod:
    found = read_gpu_pod(share(name), load_settings())
    assert found is not None
    return found


@pytest.fixture
def writers() -> Iterator[list[RecordWriter]]:
    running: list[RecordWriter] = []
    yield running
    for writer in running:
        writer.stop()


@pytest.mark.parametrize(
    "error", [Unreachable("gone"), *(ApiError(status, "", "") for status in (401, 429, 500))], ids=str
)
def test_what_fails_is_tried_again_and_the_order_stays(writers: list[RecordWriter], error: Exception) -> None:
    api = FakeApi(error)
    writers.append(writer := RecordWriter(api))
    writer.start()
    writer.write(known("p"), {"a": "1"})
    writer.write(known("q"), {"a": "2"})
    until(lambda: len(api.patches) == 3)
    assert [path.rpartition("/")[2] for path, _ in api.patches] == ["p", "p", "q"]
    assert api.patches[0][1] == {"metadata": {"uid": "uid-p", "annotations": {"a": "1"}}}


@pytest.mark.parametrize(
    "error",
    [
        ApiError(409, "Conflict", "another uid"),
        ApiError(400, "", 'admission webhook "x" denied the request: without a code'),
        ApiError(413, "RequestEntityTooLarge", ""),
    ],
    ids=lambda error: str(error.status),
)
def test_what_can_never_be_written_holds_up_nothing(writers: list[RecordWriter], error: ApiError) -> None:
    api = FakeApi(error)
    writers.append(writer := RecordWriter(api))
    writer.start()
    writer.write(known("p"), {})
    writer.write(known("q"), {})
    until(lambda: len(api.patches) >= 2)
    assert [path.rpartition("/")[2] for path, _ in api.patches[:2]] == ["p", "q"]


def test_whoever_writes_does_not_wait(writers: list[RecordWriter]) -> None:
    api = FakeApi()
    api.go_on.clear()
    writers.append(writer := RecordWriter(api))
    writer.start()
    writer.write(known("p"), {})
    assert not api.patches
    api.go_on.set()
    until(lambda: api.patches)
