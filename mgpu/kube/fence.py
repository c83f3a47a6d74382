"""Prevents writes of a process that no longer leads.

A process can be suspended at any moment (SIGSTOP, a suspended machine, a blocked disk), and can continue after another
replica has become the leader. Its earlier decisions may be wrong then. So leadership must be checked immediately before
each write, and not only before each decision. `scheduler.runtime` gives a `FencedApi` to the parts that write its
decisions. A `FencedApi` has no connections of its own, so it must override every method of `Api` that sends a request.
Only `list` is inherited, because it calls `pages`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mgpu.kube.client import MERGE_PATCH, Api, Watch


class FencedApi(Api):
    """An Api that calls `fence` before each write.

    Args:
        fence: A function that raises Unreachable if this process must not write. Callers can then retry later, as after
            any Unreachable.
    """

    def __init__(self, api: Api, fence: Callable[[], None]) -> None:
        self._inner = api
        self._fence = fence

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return self._inner.get(path, **query)

    def fetch(
        self, path: str, headers: Mapping[str, str], *, seconds: float | None, **query: object
    ) -> tuple[bytes, Mapping[str, str]]:
        return self._inner.fetch(path, headers, seconds=seconds, **query)

    def fetch_within(self, path: str, *, seconds: float, most: int) -> bytes:
        return self._inner.fetch_within(path, seconds=seconds, most=most)

    def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        return self._inner.pages(path, **query)

    def watch(self, path: str, resource_version: str, *, seconds: int = 300, **query: Any) -> Watch:
        return self._inner.watch(path, resource_version, seconds=seconds, **query)

    def create(self, path: str, body: Mapping[str, Any], **query: object) -> dict[str, Any]:
        self._fence()
        return self._inner.create(path, body, **query)

    def replace(self, path: str, body: Mapping[str, Any], **query: object) -> dict[str, Any]:
        self._fence()
        return self._inner.replace(path, body, **query)

    def patch(self, path: str, body: object, content_type: str = MERGE_PATCH, **query: object) -> dict[str, Any]:
        self._fence()
        return self._inner.patch(path, body, content_type, **query)

    def delete(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> dict[str, Any]:
        self._fence()
        return self._inner.delete(path, body, **query)

    def close(self) -> None:
        self._inner.close()
