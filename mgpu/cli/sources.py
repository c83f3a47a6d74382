"""The options and the reading that `mgpu inspect`, `mgpu top` and `mgpu explain` share: from where, and how often.

The scheduler is asked first (`mgpu.cli.scheduler_source`). If it cannot be asked, the command lists the objects of the
API server, and says so.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import click

from mgpu.cli import cluster_objects, completion
from mgpu.cli.cluster_objects import ClusterLists
from mgpu.cli.connection import NAMESPACE, Connection, read_installed_settings, report_api_errors
from mgpu.cli.inspect import overview_of
from mgpu.cli.kubectl_options import cluster_options
from mgpu.cli.progress import CountingApi, listing
from mgpu.cli.scheduler_source import ANSWER_SECONDS, Freshness, SchedulerSource, Unavailable
from mgpu.kube import Api
from mgpu.presentation.answers import ClusterAnswer
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.overview import Overview
from mgpu.presentation.plain_text import one_line
from mgpu.settings import Settings

T = TypeVar("T")
AUTO, SCHEDULER, API = "auto", "scheduler", "api"
FROM_SCHEDULER = "from the scheduler"
"""The origin of what the scheduler has answered."""
STALE_SECONDS = 10
"""An answer of the scheduler that may be older than this is shown with its age."""
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """What the user has chosen with the options of `reading_options`.

    Attributes:
        config: a settings file. With it, the API server is asked, since the scheduler has its own settings.
        interval: the seconds between two looks; None to look once.
        format: the format of the output, one of `mgpu.cli.watching.FORMATS`.
        installation: the namespace of the installation.
    """

    source: str
    connection: Connection
    config: Path | None
    interval: float | None
    format: str
    installation: str


def reading_options(*formats: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of a command that reads the cluster.

    The command gets them as the argument `options`.

    Args:
        formats: the formats of the output, of which the first is the default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(
            source: str,
            watches: bool,
            interval: float,
            connection: Connection,
            config: Path | None,
            installation: str,
            output: str,
            **own: object,
        ) -> None:
            chosen = ReadingOptions(source, connection, config, interval if watches else None, output, installation)
            command(options=chosen, **own)

        decorated: Callable[..., None] = with_options
        for option in reversed((*_OPTIONS, output_option(*formats))):
            decorated = option(decorated)
        return decorated

    return decorate


def output_option(*formats: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option `-o`, whose value is the argument `output`. The first format is the default."""
    kind = click.Choice(formats)
    return click.option("-o", "--output", type=kind, default=formats[0], show_default=True, help="The output format.")


def installation_option(*aliases: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option `--mgpu-namespace`, whose value is the argument `installation`.

    Args:
        aliases: further names of the option.
    """
    return click.option(
        "--mgpu-namespace",
        *aliases,
        "installation",
        default=NAMESPACE,
        show_default=True,
        envvar="MGPU_NAMESPACE",
        show_envvar=True,
        shell_complete=completion.namespaces,
        help="The namespace of mgpu's scheduler and agents.",
    )


_OPTIONS = (
    click.option(
        "--from",
        "source",
        type=click.Choice([AUTO, SCHEDULER, API]),
        default=AUTO,
        show_default=True,
        help="Whom to ask. auto asks the scheduler and, if it does not answer, the API server.",
    ),
    click.option(
        "-w",
        "--watch",
        "watches",
        is_flag=True,
        help="Show the output again whenever it changes, until Ctrl-C.",
    ),
    click.option(
        "--interval",
        type=click.FloatRange(min=1.0),
        default=_SECONDS,
        show_default=True,
        help="With --watch: the seconds between two looks.",
    ),
    cluster_options,
    click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).  [default: the cluster's]"),
    installation_option(),
)


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What was read, and from where.

    Attributes:
        origin: a text such as `from the scheduler`, which `--watch` shows.
    """

    value: T
    origin: str


class Sources:
    """The cluster of a kubeconfig, asked through the scheduler or the API server.

    Attributes:
        api: a connection with the rights of the user.
        namespace: the namespace of the installation.

    Raises:
        BadObject: if the kubeconfig is invalid, or if `source` and `config` contradict.
    """

    def __init__(self, options: ReadingOptions) -> None:
        if options.config and options.source == SCHEDULER:
            raise click.UsageError("--config needs --from api: the scheduler answers by its own settings")
        connection = options.connection
        self.api: Api = connection.connect(30.0, CountingApi)
        self._config = options.config
        self.namespace = options.installation
        seconds = connection.seconds(ANSWER_SECONDS)
        self.scheduler = SchedulerSource(self.api, self.namespace, seconds=seconds)
        self._source = options.source

    def settings(self) -> Settings:
        return read_installed_settings(self.api, self._config, self.namespace)[0]

    def read(
        self,
        ask: Callable[[SchedulerSource], tuple[T, Freshness] | None],
        from_lists: Callable[[], T],
    ) -> Reading[T] | None:
        """Return what the scheduler answers, or else what `from_lists` returns; None if nothing has changed.

        Raises ClickException if the source of the user does not answer.
        """
        why = "the settings of --config apply" if self._config else "--from api"
        if not self._config and self._source != API:
            try:
                with cluster_objects.paused_garbage_collection():
                    answer = ask(self.scheduler)
                if answer is None:
                    return None
                value, freshness = answer
                _tell(freshness)
                return Reading(value, FROM_SCHEDULER)
            except Unavailable as error:
                if self._source == SCHEDULER:
                    raise click.ClickException(f"the scheduler does not answer: {error}") from error
                why = str(error)
                self.scheduler.forget()
        with report_api_errors(), cluster_objects.paused_garbage_collection(), listing(self.api, one_line(why)):
            return Reading(from_lists(), "from the API server")


def _tell(freshness: Freshness) -> None:
    if freshness.note:
        click.echo(f"Note: {one_line(freshness.note)}", err=True)
    if freshness.age > STALE_SECONDS:
        click.echo(f"Note: the scheduler has not heard from the API server for {freshness.age} s", err=True)


GangsOfLists = Callable[[Api, Settings, ClusterLists, Overview], Sequence[GangView]]
"""Returns the gangs that are not complete, from the lists of which the overview was made."""


def read_cluster(sources: Sources, gangs_of_lists: GangsOfLists = lambda *_: ()) -> Reading[ClusterAnswer] | None:
    """Return the cluster, or None if nothing has changed since the last call for the same sources.

    Args:
        gangs_of_lists: by default there are no gangs, for a command that does not show them.
    """

    def from_lists() -> ClusterAnswer:
        settings = sources.settings()
        lists = cluster_objects.read_lists(sources.api)
        overview = overview_of(lists, settings)
        return ClusterAnswer(overview, tuple(gangs_of_lists(sources.api, settings, lists, overview)))

    return sources.read(lambda scheduler: scheduler.cluster(), from_lists)
