"""Shows on stderr that a command lists the objects of the API server, how many it has read, and why it does so.

`mgpu.cli.sources` uses it. Only a terminal gets the line, so that the output of scripts does
not change.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mgpu.kube import Api
from mgpu.presentation.terminal import Terminal


class CountingApi(Api):
    """An Api that counts the objects of its lists.

    Attributes:
        objects: how many objects its lists have had so far.
    """

    objects = 0

    def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        for page, version in super().pages(path, **query):
            yield self._counted(page), version
            self.listed()

    def _counted(self, page: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for raw in page:
            self.objects += 1
            yield raw

    def listed(self) -> None:
        """Called after each page. `listing` replaces it."""


@contextmanager
def listing(api: Api, why: str) -> Iterator[None]:
    """Show the progress of the lists of `api` in the context, if stderr is a terminal.

    Args:
        why: the reason why the scheduler does not answer, which the line shows.
    """
    terminal = Terminal(stderr=True)
    if not terminal.is_terminal or not isinstance(api, CountingApi):
        yield
        return
    terminal.print(f"Reading from the API server: {why}", style="grey50")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    before = api.objects
    with Progress(*columns, console=terminal, transient=True) as progress:
        task = progress.add_task("Reading", total=None)

        def listed() -> None:
            progress.update(task, description=f"{api.objects - before:,} objects")

        api.listed = listed  # type: ignore[method-assign]
        try:
            yield
        finally:
            del api.listed
