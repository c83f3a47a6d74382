"""Records that are written back, behind everything else."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from deviceplugin.pods.record_writer import RecordWriter
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.settings import load_settings
from tests.builders import share
from tests.waiting import until


class Here:
    """Some pods are on the node and have not ended."""

    def is_active(self, uid: str) -> bool:
        return uid in {"uid-p", "uid-q", "uid-broken"}


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
def test_record_whose_write_fails_is_written_again(writers: list[RecordWriter], error: Exception) -> None:
    api = FakeApi(error)
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    writer.write(known("p"), {"a": "1"})
    until(lambda: len(api.patches) == 2)
    assert [path.rpartition("/")[2] for path, _ in api.patches] == ["p", "p"]
    assert api.patches[0][1] == {"metadata": {"uid": "uid-p", "annotations": {"a": "1"}}}


@pytest.mark.parametrize(
    "error",
    [
        ApiError(404, "NotFound", ""),
        ApiError(400, "", 'admission webhook "x" denied the request: without a code'),
        ApiError(413, "RequestEntityTooLarge", ""),
    ],
    ids=lambda error: str(error.status),
)
def test_record_that_is_refused_for_good_blocks_no_other(writers: list[RecordWriter], error: ApiError) -> None:
    api = FakeApi(error)
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    writer.write(known("p"), {})
    writer.write(known("q"), {})
    until(lambda: len(api.patches) >= 2)
    assert [path.rpartition("/")[2] for path, _ in api.patches[:2]] == ["p", "q"]


def test_conflict_is_retried_while_the_pod_is_on_the_node(writers: list[RecordWriter]) -> None:
    """The API server answers 409 too where it has lost five races with other writers of the same pod."""
    api = FakeApi(*(ApiError(409, "Conflict", "the object has been modified") for _ in range(2)))
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    writer.write(known("gone"), {"a": "1"})
    until(lambda: len(api.patches) == 1)
    writer.write(known("p"), {"a": "1"})
    until(lambda: len(api.patches) == 3)
    assert [path.rpartition("/")[2] for path, _ in api.patches] == ["gone", "p", "p"]


def test_write_does_not_wait_for_the_api_server(writers: list[RecordWriter]) -> None:
    api = FakeApi()
    api.go_on.clear()
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    writer.write(known("p"), {})
    assert not api.patches
    api.go_on.set()
    until(lambda: api.patches)


class HostileApi(Api):
    """Fails every write of the pods `broken`, at once or after `seconds`, and notes the others'."""

    def __init__(self, *broken: str, seconds: float = 0) -> None:
        self.broken, self.seconds = broken, seconds
        self.written: list[tuple[str, dict[str, str]]] = []
        self.attempts: list[tuple[str, dict[str, str]]] = []

    def patch(self, path: str, body: Any, *_: Any, **__: Any) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        self.attempts.append((name, body["metadata"]["annotations"]))
        if name in self.broken:
            time.sleep(self.seconds)
            raise ApiError(500, "InternalError", "no")
        self.written.append(self.attempts[-1])
        return {}


def test_pod_whose_writes_always_fail_blocks_no_record_of_another(writers: list[RecordWriter]) -> None:
    api = HostileApi("broken")
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    writer.write(known("broken"), {"a": "1"})
    for i in range(20):
        writer.write(known(f"p{i}"), {"a": "1"})
    until(lambda: len(api.written) == 20)
    until(lambda: len(api.attempts) >= 23)  # and it is tried again


def test_retries_that_time_out_delay_no_first_attempt(writers: list[RecordWriter]) -> None:
    end = threading.Event()

    class Slow(HostileApi):
        """Writes of `broken` pods fail at once; a second write of one takes until `end`."""

        def patch(self, path: str, body: Any, *_: Any, **__: Any) -> dict[str, Any]:
            if path.rpartition("/")[2] in [name for name, _ in self.attempts if name in self.broken]:
                retried.set()
                end.wait(60)
            return super().patch(path, body)

    retried = threading.Event()
    broken = [f"broken{i}" for i in range(3)]
    api = Slow(*broken)
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    for name in broken:
        writer.write(known(name), {"a": "1"})
    assert retried.wait(60)
    writer.write(known("p"), {"a": "1"})
    try:
        until(lambda: api.written, seconds=30)
    finally:
        end.set()


def test_later_write_of_a_pod_does_not_overtake_one_that_failed(writers: list[RecordWriter]) -> None:
    api = HostileApi("p", seconds=0.1)
    writers.append(writer := RecordWriter(api, Here()))
    writer.start()
    writer.write(known("p"), {"a": "1", "b": "1"})
    until(lambda: api.attempts)
    writer.write(known("p"), {"a": "2"})
    until(lambda: len(api.attempts) >= 2)
    writer.write(known("p"), {"a": "3"})
    api.broken = ()
    until(lambda: api.written and api.written[-1][1].get("a") == "3")
    merged: dict[str, str] = {}
    for _, annotations in api.written:
        merged |= annotations
    assert merged == {"a": "3", "b": "1"}
    assert api.attempts[0] == ("p", {"a": "1", "b": "1"})
    assert api.attempts[1] == ("p", {"a": "2", "b": "1"})
