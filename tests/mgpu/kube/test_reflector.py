import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from tests.waiting import until

DEADLINE = 30.0


class Ended(Exception):
    """The watch's stream ends."""


class Stream:
    def __init__(self, version: str) -> None:
        self.version = version
        self.events: queue.Queue[Any] = queue.Queue()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        while True:
            event = self.events.get(timeout=DEADLINE)
            if isinstance(event, Ended):
                return
            if isinstance(event, Exception):
                raise event
            yield event

    def end(self) -> None:
        self.events.put(Ended())

    def close(self) -> None:
        """Nothing is open."""


class FakeApi:
    """Lists `items`; watches say what the test puts into the newest stream."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items, self.version = list(items), 1
        self.refuse: Exception | None = None
        self.streams: queue.Queue[Stream] = queue.Queue()
        self.lists = 0

    def pages(self, _path: str, **_query: Any) -> Iterator[tuple[list[dict[str, Any]], str]]:
        self.lists += 1
        if self.refuse:
            raise self.refuse
        for item in self.items:
            yield [item], str(self.version)
        yield [], str(self.version)

    def watch(self, _path: str, version: str, **_query: Any) -> Stream:
        stream = Stream(version)
        self.streams.put(stream)
        return stream


def item(name: str, version: int, uid: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "d", "uid": uid or f"uid-{name}", "resourceVersion": str(version)}}


class Seen:
    """A reflector that runs, and what it has told."""

    def __init__(self, api: FakeApi, **options: Any) -> None:
        self.api, self.told = api, queue.Queue[str]()
        self.failing = ""
        client: Any = api
        self.reflector = Reflector(client, "/things", self._changed, self._gone, **options)
        self.reflector.start()

    def _changed(self, raw: dict[str, Any]) -> None:
        self.told.put(f"+{raw['metadata']['uid']}@{raw['metadata']['resourceVersion']}")
        if raw["metadata"]["uid"] == self.failing:
            raise ValueError("a bug")

    def _gone(self, raw: dict[str, Any]) -> None:
        self.told.put(f"-{raw['metadata']['uid']}")

    def next(self, count: int = 1) -> list[str]:
        return [self.told.get(timeout=DEADLINE) for _ in range(count)]

    def stream(self) -> Stream:
        return self.api.streams.get(timeout=DEADLINE)


@pytest.fixture
def run() -> Iterator[Callable[..., Seen]]:
    made: list[Seen] = []

    def start(api: FakeApi, **options: Any) -> Seen:
        made.append(Seen(api, **options))
        return made[-1]

    yield start
    for seen in made:
        seen.reflector.stop()


def test_what_is_listed_and_then_what_happens(run: Callable[..., Seen]) -> None:
    seen = run(FakeApi(item("a", 1)))
    stream = seen.stream()
    assert seen.reflector.synced
    stream.events.put(("ADDED", item("b", 2)))
    stream.events.put(("MODIFIED", item("a", 3)))
    stream.events.put(("BOOKMARK", {"metadata": {"resourceVersion": "9"}}))
    stream.events.put(("DELETED", item("b", 10)))
    assert seen.next(4) == ["+uid-a@1", "+uid-b@2", "+uid-a@3", "-uid-b"]


def test_a_watch_goes_on_where_the_last_one_ended(run: Callable[..., Seen]) -> None:
    seen = run(FakeApi(item("a", 1)))
    stream = seen.stream()
    stream.events.put(("BOOKMARK", {"metadata": {"resourceVersion": "9"}}))
    stream.end()
    assert seen.stream().version == "9"
    assert seen.api.lists == 1


@pytest.mark.parametrize("how", [ApiError(410, "Expired", "too old"), Unreachable("broken"), ValueError("odd")])
def test_after_a_break_the_new_list_is_diffed(run: Callable[..., Seen], how: Exception) -> None:
    seen = run(FakeApi(item("a", 1), item("b", 1), item("c", 1, "first")))
    stream = seen.stream()
    seen.next(3)
    seen.api.items = [item("a", 1), item("b", 5), item("c", 6, "second")]
    stream.events.put(how)
    assert seen.next(3) == ["+uid-b@5", "-first", "+second@6"], "whoever goes by names would lose the successor"
    seen.stream()
    assert seen.told.empty()
    assert seen.reflector.broken_for == 0


def test_it_tells_while_it_is_forbidden(run: Callable[..., Seen]) -> None:
    api = FakeApi(item("a", 1))
    api.refuse = ApiError(403, "Forbidden", "things is forbidden")
    seen = run(api)
    until(lambda: seen.reflector.forbidden)
    assert not seen.reflector.synced
    api.refuse = None
    seen.stream()
    assert (seen.reflector.forbidden, seen.next()) == (False, ["+uid-a@1"])


class Unwatchable(FakeApi):
    def watch(self, _path: str, version: str, **_query: Any) -> Stream:  # noqa: ARG002
        raise ApiError(403, "Forbidden", "things may be listed alone")


class Counting(Reflector):
    """Rests only for the record, and stops after eight times."""

    def _rest(self, seconds: float) -> None:
        self.rests = [*getattr(self, "rests", []), seconds]
        if len(self.rests) == 8:
            self.stop()


def test_who_may_list_and_not_watch_lists_ever_less_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    api: Any = Unwatchable(item("a", 1))
    reflector = Counting(api, "/things", lambda _: None, lambda _: None)
    reflector._run()
    assert api.lists == 8
    assert reflector.rests[-1] > 8 * reflector.rests[0]
    assert len(caplog.messages) == 1


def test_a_refresh_sees_everything_that_was_written_before_it(run: Callable[..., Seen]) -> None:
    seen = run(FakeApi(item("a", 1)))
    seen.stream()
    seen.next()
    seen.api.items.append(item("b", 2))  # and the watch does not say so
    assert seen.reflector.refresh(DEADLINE)
    assert seen.next() == ["+uid-b@2"]


def test_a_refresh_without_an_answer_is_none(run: Callable[..., Seen]) -> None:
    seen = run(FakeApi())
    seen.stream()
    seen.api.refuse = Unreachable("away")
    assert not seen.reflector.refresh(0.05)
    until(lambda: seen.reflector.broken_for > 0)


def test_a_kind_that_is_not_served_is_empty_and_asked_again(run: Callable[..., Seen]) -> None:
    api = FakeApi(item("a", 1))
    api.refuse = ApiError(404, "NotFound", "no such kind")
    seen = run(api, optional=True)
    assert seen.reflector.wait_synced(DEADLINE)
    assert seen.reflector.broken_for == 0
    api.refuse = None
    assert seen.next() == ["+uid-a@1"]


def test_a_kind_that_is_not_served_is_asked_for_at_once_where_somebody_waits_for_it(run: Callable[..., Seen]) -> None:
    """A replica that begins to lead waits for the list, whether the kind is served or not."""
    api = FakeApi()
    api.refuse = ApiError(404, "NotFound", "no such kind")
    seen = run(api, optional=True)
    until(lambda: api.lists >= 5)  # it rests for seconds by now
    before = api.lists
    assert seen.reflector.refresh(DEADLINE)
    assert api.lists == before + 1


def test_a_kind_that_is_not_served_is_asked_for_as_rarely_as_the_caller_wants(
    run: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses vary at random by a half."""
    rests: list[float] = []
    monkeypatch.setattr(Reflector, "_rest", lambda _self, seconds: rests.append(seconds))
    api = FakeApi(item("a", 1))
    api.refuse = ApiError(404, "NotFound", "no such kind")
    seen = run(api, optional=True, missing_seconds=60)
    until(lambda: len(rests) > 20)
    assert rests[0] < 1
    assert 30 <= min(rests[10:20]) <= max(rests[10:20]) <= 90
    api.refuse = None
    assert seen.next() == ["+uid-a@1"]


def test_any_other_kind_must_be_served(run: Callable[..., Seen]) -> None:
    api = FakeApi()
    api.refuse = ApiError(404, "NotFound", "no such kind")
    seen = run(api)
    until(lambda: api.lists > 1)
    assert not seen.reflector.synced


def test_a_callback_that_fails_does_not_stop_the_watch(run: Callable[..., Seen]) -> None:
    seen = run(FakeApi())
    seen.failing = "uid-a"
    stream = seen.stream()
    stream.events.put(("ADDED", item("a", 2)))
    stream.events.put(("ADDED", item("b", 3)))
    assert seen.next(2) == ["+uid-a@2", "+uid-b@3"]


def test_it_stops_while_it_waits_for_events(run: Callable[..., Seen]) -> None:
    seen = run(FakeApi())
    seen.stream()
    seen.reflector.stop()
    until(lambda: not any(thread.name == "watch /things" for thread in threading.enumerate()))
