"""`mgpu webhook`: settings, certificates, the app, gunicorn."""

import logging
import os
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
from mgpu.settings import Settings, WebhookSettings, load_settings
from webhook.app import make_app

_log = logging.getLogger(__name__)
_CONFIGURATIONS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")

EXAMPLES = """
\b
Examples:
  # In a cluster: makes its certificate, shares it in a Secret, publishes its CA
  mgpu webhook --config /etc/mgpu/mgpu.yaml
\b
  # With cert-manager's certificate
  mgpu webhook --cert-dir /tls
\b
  # Beside a cluster, for a webhook configuration that names a URL
  mgpu webhook --kubeconfig ~/.kube/config --host 127.0.0.1 --names host.example
\b
  # By hand: any free port (the first line says which), CA in certs/ca.crt
  mgpu webhook --host 127.0.0.1 --port 0 --self-signed-dir certs
"""


@click.command(epilog=EXAMPLES)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--host", help="Address to listen on.  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Port; 0: any free one.  [default: 8443]")
@click.option("--workers", type=int, help="Processes.  [default: 2]")
@click.option("--cert-dir", help="Serve tls.crt and tls.key from here, and follow them.")
@click.option("--self-signed-dir", help="Keep the self-made certificate here.  [default: a private directory]")
@click.option("--names", help="More DNS names and addresses for the self-made certificate, with commas between.")
@click.option("--identities", help="Users that may write placement annotations, with commas between.")
@click.option("--kubeconfig", default="", help="The cluster to publish the CA in.  [default: the one this runs in]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def command(config: Path | None, kubeconfig: str, log_level: str, **flags: str | int | None) -> None:
    """Serve the admission webhook: /mutate and /validate.

    Denies GPU pods that break a rule of their vocabulary and completes the others. Prints one line,
    `serving https on HOST:PORT`, when it accepts connections; logs are JSON lines on stderr.
    """
    settings = _settings(config, flags)
    logs.setup(log_level)
    with ExitStack() as stack:
        run(settings, kubeconfig, stack)


def run(settings: Settings, kubeconfig: str, stack: ExitStack) -> None:
    """Serve until told to stop. `stack`: what is to be undone afterwards."""
    own = settings.webhook
    listen = [Listen(own.host, own.port)]
    if own.cert_dir:
        app = make_app(settings)
        serve(app.wsgi_app, listen, certificate=given(Path(own.cert_dir)), workers=own.workers)
        return
    folder = Folder(Path(own.self_signed_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="mgpu-"))))
    in_cluster = not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ
    api = Api.connect(kubeconfig) if kubeconfig or in_cluster else None
    store = SecretStore(api, own.namespace, f"{own.service}-tls") if api and in_cluster else None
    keeper = Keeper(folder, _names(own), store, _publisher(api, own.configuration) if api else None)
    try:
        keeper.renew()
    except OSError as error:
        raise BadObject([Problem(str(folder.path), f"cannot keep certificates: {error.strerror}")]) from error
    except (ApiError, Unreachable, RetryLater) as error:
        raise click.ClickException(f"no serving certificate: {error}") from error
    if api:
        api.close()  # the workers open connections of their own
    app = make_app(settings, keeper.ready)
    serve(
        app.wsgi_app,
        listen,
        certificate=(folder.chain, folder.key),
        workers=own.workers,
        start=keeper.start,
        stop=keeper.stop,
    )


def _settings(config: Path | None, flags: dict[str, str | int | None]) -> Settings:
    text = ""
    if config:
        try:
            text = config.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadObject([Problem(str(config), f"cannot be read: {error}")]) from error
    keys = {name: "webhook." + _camel(name) for name in flags}
    return load_settings(text, str(config or "settings"), os.environ, {keys[n]: v for n, v in flags.items()})


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _names(own: WebhookSettings) -> set[str]:
    """What clients may call this process by."""
    service = f"{own.service}.{own.namespace}.svc"
    listening = {own.host} - {"", "0.0.0.0", "::"}
    return {service, f"{service}.cluster.local", "localhost", "127.0.0.1", "::1", *listening, *own.names}


def _publisher(api: Api, configuration: str) -> Callable[[bytes], None]:
    def told(ca: bytes) -> None:
        for kind in _CONFIGURATIONS:
            if publish(api, kind, configuration, ca):
                _log.info("CA bundle published", extra={"kind": kind, "configuration": configuration})

    return told
