"""Coroutines on a loop and a thread of their own, so that tests can call them as the kubelet does: from outside."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(work: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[asyncio.AbstractEventLoop]:
    """`work` runs until the end of the block, then it is cancelled; what it raises is raised here."""
    loop = asyncio.new_event_loop()
    asyncio_thread = threading.Thread(target=loop.run_forever, name="loop")
    asyncio_thread.start()
    task = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        yield loop
    finally:
        task.cancel()
        asyncio.run_coroutine_threadsafe(_others_done(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        asyncio_thread.join(60)
        loop.close()
    if not task.cancelled():
        task.result()


async def _others_done() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
