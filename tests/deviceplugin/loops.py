"""Runs a coroutine on another thread, so that a test can call it from outside."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(work: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[asyncio.AbstractEventLoop]:
    """Run `work` until the end of the block, and then cancel it. Its errors are raised here."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop")
    thread.start()
    task = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        yield loop
    finally:
        task.cancel()
        asyncio.run_coroutine_threadsafe(_others_done(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
    if not task.cancelled():
        task.result()


async def _others_done() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
