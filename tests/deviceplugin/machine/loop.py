"""An event loop with virtual time, which advances only when nothing else can run, so that no test waits."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that the test runs in steps, so that it can act while calls are in progress."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self.now

    def let_pass(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.run_until_complete(work)


class _NoWait(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "waits for what will never happen"
            self._loop.now += timeout
        return ready
