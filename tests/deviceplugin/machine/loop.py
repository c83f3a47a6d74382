"""An event loop whose time passes only when nothing else is left to do: what waits five seconds waits none."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Driven from outside, a bit at a time: several calls can be under way while the test does something else."""

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
