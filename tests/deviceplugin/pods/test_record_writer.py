"""The writer that stores allocation records on pods in the background."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from deviceplugin.pods.record_writer import RecordWriter
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.settings import load_settings
from tests.builders import share
from tests.waiting import until

INTERNAL_ERROR = ApiError(500, "InternalError", "")


class FakePods:
    """All pods but `gone` are on the node."""

    def is_active(self, uid: str) -> bool:
        return uid != "uid-gone"

    def amend(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None: ...


class FakeApi(Api):
    """Fails the first writes with `errors`, and later those of pods whose name begins with `broken`."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.broken: str | None = "broken"
        self.before_write: Callable[[str], object] = lambda _: None
        self.attempts: list[tuple[str, Any]] = []
        self.written: list[tuple[str, Any]] = []
        self.uids: set[str] = set()

    def patch(self, path: str, body: Any, *_: Any, **__: Any) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        self.before_write(name)
        self.attempts.append((name, body["metadata"]["annotations"]))
        self.uids.add(body["metadata"]["uid"])
        if self.errors:
            raise self.errors.pop(0)
        if self.broken and name.startswith(self.broken):
            raise INTERNAL_ERROR
        self.written.append(self.attempts[-1])
        return {}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.attempts]


def gpu_pod(name: str) -> GpuPod:
    found = read_gpu_pod(share(name), load_settings())
    assert found is not None
    return found


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def writer(api: FakeApi) -> Iterator[RecordWriter]:
    writer = RecordWriter(api, FakePods())
    writer.start()
    yield writer
    writer.stop()


@pytest.mark.parametrize("error", [Unreachable("gone"), *(ApiError(s, "", "") for s in (401, 429, 500))], ids=str)
def test_failed_write_is_retried_with_the_uid_as_precondition(
    api: FakeApi, writer: RecordWriter, error: Exception
) -> None:
    api.errors = [error]
    writer.write(gpu_pod("p"), {"a": "1"})
    until(lambda: api.written)
    assert api.attempts == [("p", {"a": "1"})] * 2
    assert api.uids == {"uid-p"}


@pytest.mark.parametrize("status", [404, 400, 413])
def test_final_refusal_is_not_retried(api: FakeApi, writer: RecordWriter, status: int) -> None:
    api.errors = [ApiError(status, "", "")]
    writer.write(gpu_pod("p"), {})
    writer.write(gpu_pod("q"), {})
    until(lambda: len(api.attempts) >= 2)
    assert api.names[:2] == ["p", "q"]


def test_conflict_is_retried_while_the_pod_is_on_the_node(api: FakeApi, writer: RecordWriter) -> None:
    """The API server also answers 409 if it has lost five races with other writers of the same pod."""
    api.errors = [ApiError(409, "Conflict", "the object has been modified") for _ in range(2)]
    writer.write(gpu_pod("gone"), {"a": "1"})
    until(lambda: len(api.attempts) == 1)
    writer.write(gpu_pod("p"), {"a": "1"})
    until(lambda: len(api.attempts) == 3)
    assert api.names == ["gone", "p", "p"]


def test_write_does_not_wait_for_the_api_server(api: FakeApi, writer: RecordWriter) -> None:
    answering = threading.Event()
    api.before_write = lambda _: answering.wait(60)
    writer.write(gpu_pod("p"), {})
    assert not api.attempts
    answering.set()
    until(lambda: api.attempts)


def test_pod_whose_writes_always_fail_delays_no_other_pod(api: FakeApi, writer: RecordWriter) -> None:
    writer.write(gpu_pod("broken"), {"a": "1"})
    for i in range(20):
        writer.write(gpu_pod(f"p{i}"), {"a": "1"})
    until(lambda: len(api.written) == 20)
    until(lambda: api.names.count("broken") >= 3)


def test_retries_that_time_out_delay_no_first_attempt(api: FakeApi, writer: RecordWriter) -> None:
    retried, ended = threading.Event(), threading.Event()

    def hang_on_retry(name: str) -> None:
        if name in api.names:
            retried.set()
            ended.wait(60)

    api.before_write = hang_on_retry
    for i in range(3):
        writer.write(gpu_pod(f"broken{i}"), {"a": "1"})
    assert retried.wait(60)
    writer.write(gpu_pod("p"), {"a": "1"})
    try:
        until(lambda: api.written, seconds=30)
    finally:
        ended.set()


def test_later_write_is_merged_with_a_failed_one(api: FakeApi, writer: RecordWriter) -> None:
    api.broken = "p"
    api.before_write = lambda _: time.sleep(0.1)
    writer.write(gpu_pod("p"), {"a": "1", "b": "1"})
    until(lambda: api.attempts)
    writer.write(gpu_pod("p"), {"a": "2"})
    until(lambda: len(api.attempts) >= 2)
    writer.write(gpu_pod("p"), {"a": "3"})
    api.broken = None
    until(lambda: api.written and api.written[-1][1].get("a") == "3")
    assert api.written[-1][1] == {"a": "3", "b": "1"}
    assert api.attempts[:2] == [("p", {"a": "1", "b": "1"}), ("p", {"a": "2", "b": "1"})]
