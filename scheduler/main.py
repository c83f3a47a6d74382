"""`mgpu scheduler`: settings, the API server, certificates, gunicorn."""

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.secrets import SecretStore
from mgpu.model.errors import BadObject, Problem, RetryLater
from mgpu.serving import logs
from mgpu.serving.folder import Folder, given
from mgpu.serving.keeper import Keeper
from mgpu.serving.server import Listen, serve
from mgpu.serving.trust import publish
from mgpu.settings import SchedulerSettings, Settings, load_settings
from scheduler.app import by_listener, make_apps
from scheduler.process import Process

# A thread of `/bind` waits for the API server, which waits for the admission here: there must be threads left for it.
_THREADS = 64

EXAMPLES = """
\b
Examples:
  # In a cluster: makes its certificate, shares it in a Secret, publishes its CA
  mgpu scheduler --config /etc/mgpu/mgpu.yaml
\b
  # With cert-manager's certificate
  mgpu scheduler --cert-dir /tls
\b
  # Beside a cluster, alone: no lease, any free ports (the first lines say which)
  mgpu scheduler --kubeconfig ~/.kube/config --host 127.0.0.1 --port 0 --extender-port 0 --no-leader-elect
"""


@click.command(epilog=EXAMPLES)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--host", help="Address of the binding admission (HTTPS).  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Its port; 0: any free one.  [default: 8444]")
@click.option("--extender-host", help="Address of the extender (plain HTTP).  [default: 127.0.0.1]")
@click.option("--extender-port", type=int, help="Its port; 0: any free one.  [default: 8888]")
@click.option("--cert-dir", help="Serve tls.crt and tls.key from here, and follow them.")
@click.option("--self-signed-dir", help="Keep the self-made certificate here.  [default: a private directory]")
@click.option("--names", help="More DNS names and addresses for the self-made certificate, with commas between.")
@click.option("--leader-elect/--no-leader-elect", default=None, help="One of several replicas decides.  [default: on]")
@click.option("--kubeconfig", default="", help="The cluster to serve.  [default: the one this runs in]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def command(config: Path | None, kubeconfig: str, log_level: str, **flags: str | int | bool | None) -> None:
    """Serve the scheduler: binding admission and extender.

    Decides the cards of every GPU pod in the binding that gives it its node. Prints one line per address,
    `serving https on HOST:PORT`, when it accepts connections; logs are JSON lines on stderr.
    """
    logs.setup(log_level)
    settings = _settings(config, flags)
    with ExitStack() as stack:
        run(settings, kubeconfig, stack)


def run(settings: Settings, kubeconfig: str, stack: ExitStack) -> None:
    """Serve until told to stop. `stack`: what is to be undone afterwards."""
    own = settings.scheduler
    # Not shared with the certificates' thread below: its pool is used only in the worker, after the fork.
    api = Api.connect(kubeconfig)
    process = Process(settings, api, f"{socket.gethostname()}-{os.getpid()}")
    certificate, keeper = _certificate(own, kubeconfig, stack)

    def start() -> None:
        process.start()
        if keeper:
            keeper.start()

    def stop() -> None:
        if keeper:
            keeper.stop()
        process.stop()

    serve(
        by_listener(*make_apps(process.decider, process.filter, api, settings, process)),
        [Listen(own.host, own.port), Listen(own.extender_host, own.extender_port, tls=False)],
        certificate=certificate,
        workers=1,
        threads=_THREADS,
        start=start,
        stop=stop,
    )


def _certificate(own: SchedulerSettings, kubeconfig: str, stack: ExitStack) -> tuple[tuple[Path, Path], Keeper | None]:
    if own.cert_dir:
        return given(Path(own.cert_dir)), None
    folder = Folder(Path(own.self_signed_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="mgpu-"))))
    api = Api.connect(kubeconfig)
    in_cluster = not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ
    store = SecretStore(api, own.namespace, f"{own.service}-tls") if in_cluster else None
    keeper = Keeper(folder, _names(own), store, _publisher(api, own.configuration))
    try:
        keeper.renew()
    except OSError as error:
        raise BadObject([Problem(str(folder.path), f"cannot keep certificates: {error.strerror}")]) from error
    except (ApiError, Unreachable, RetryLater) as error:
        raise click.ClickException(f"no serving certificate: {error}") from error
    api.close()  # the worker opens connections of its own
    return (folder.chain, folder.key), keeper


def _settings(config: Path | None, flags: dict[str, str | int | bool | None]) -> Settings:
    text = ""
    if config:
        try:
            text = config.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadObject([Problem(str(config), f"cannot be read: {error}")]) from error
    keys = {name: "scheduler." + _camel(name) for name in flags}
    return load_settings(text, str(config or "settings"), os.environ, {keys[n]: v for n, v in flags.items()})


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _names(own: SchedulerSettings) -> set[str]:
    """What the API server may call this process by."""
    service = f"{own.service}.{own.namespace}.svc"
    listening = {own.host} - {"", "0.0.0.0", "::"}
    return {service, f"{service}.cluster.local", "localhost", "127.0.0.1", "::1", *listening, *own.names}


def _publisher(api: Api, configuration: str) -> Callable[[bytes], None]:
    def told(ca: bytes) -> None:
        publish(api, "mutatingwebhookconfigurations", configuration, ca)

    return told
