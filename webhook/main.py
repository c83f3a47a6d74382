"""The command `mgpu webhook`: reads the settings, prepares the certificate and serves the app.

No other module of the webhook reads the environment or creates a client of the API server.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import click

from mgpu.cli.certificate import prepare_certificate, runs_in_cluster
from mgpu.cli.process_settings import UNITS, read_settings
from mgpu.kube import Api
from mgpu.serving import logs
from mgpu.serving.app import new_app, serve_metrics, serve_probes
from mgpu.serving.callers import read_callers
from mgpu.serving.certificate_folder import create_private_folder
from mgpu.serving.server import Listen, serve
from mgpu.settings import Settings
from webhook.admission import make_app
from webhook.mtgpupod_rebuild import SECONDS, FindMtgpuPod, make_finder

_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the folder in which prometheus_client stores the counts of all worker processes."""

EXAMPLES = """
\b
Examples:
  # In a cluster, with a certificate that the process signs with the CA in its Secret
  mgpu webhook --config /etc/mgpu/mgpu.yaml
\b
  # With cert-manager's certificate
  mgpu webhook --cert-dir /tls
\b
  # Outside of a cluster, for a webhook configuration with a URL and with certs/ca.crt as its caBundle
  mgpu webhook --kubeconfig ~/.kube/config --names host.example --self-signed-dir certs
\b
  # For a test: any free port, which the first line of output names; the CA is in certs/ca.crt
  mgpu webhook --host 127.0.0.1 --port 0 --self-signed-dir certs
"""


@click.command(epilog=EXAMPLES)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--host", help="Address to listen on.  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Port to listen on; 0 selects a free port.  [default: 8443]")
@click.option("--metrics-port", type=int, help="Port of /metrics and probes (plain HTTP); -1 for none.  [default: -1]")
@click.option("--workers", type=int, help="Number of worker processes.  [default: 2]")
@click.option("--cert-dir", help="Serve tls.crt and tls.key from this directory, and reload them when they change.")
@click.option("--self-signed-dir", help="Store the self-signed certificate here.  [default: a private directory]")
@click.option("--names", help="More DNS names and addresses for the self-signed certificate, separated by commas.")
@click.option("--identities", help="Users that may write placement annotations, separated by commas.")
@click.option("--scheduler-name", help="Set this schedulerName on every new GPU pod.  [default: unchanged]")
@click.option(
    "--memory-unit", type=click.Choice(UNITS, case_sensitive=False), help="The unit of gpu-mem.  [default: GiB]"
)
@click.option("--kubeconfig", default="", help="Kubeconfig of the cluster.  [default: the cluster that this runs in]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def command(config: Path | None, kubeconfig: str, log_level: str, **flags: str | int | None) -> None:
    """Serve the admission webhook: /mutate, /rebuild and /validate.

    The webhook completes GPU pods, and denies those that break a rule of their vocabulary. It builds the Pods of
    MtgpuPods, and protects placement annotations. The command prints a line such as
    `serving https on HOST:PORT` for each address when it accepts connections there. Logs are JSON lines on stderr.
    """
    settings = read_settings(config, os.environ, flags, "webhook")
    logs.set_up_logging(log_level)
    with ExitStack() as stack:
        run(settings, kubeconfig, stack)


def run(settings: Settings, kubeconfig: str, stack: ExitStack) -> None:
    """Serve until SIGTERM. Afterwards the caller must close `stack`, which removes temporary files."""
    own = settings.webhook
    certificate, renewer = prepare_certificate(own, kubeconfig, stack)
    find = _finder(kubeconfig, stack)
    if own.metrics_port >= 0:
        folder = os.environ[_METRICS_FOLDER] = create_private_folder(stack, "mgpu-metrics-")
        from webhook import admission_metrics  # Only now, because prometheus_client reads the variable at its import.

        app = make_app(settings, observe=admission_metrics.ADMISSIONS, find_mtgpupod=find)
        metrics = new_app()
        serve_probes(metrics)
        serve_metrics(metrics, lambda: admission_metrics.page(folder), admission_metrics.CONTENT_TYPE)
        metrics_listen = [Listen(own.metrics_host, own.metrics_port, metrics.wsgi_app, tls=False)]
    else:
        app = make_app(settings, find_mtgpupod=find)
        metrics_listen = []
    serve(
        [
            Listen(own.host, own.port, app.wsgi_app, client_ca=own.client_ca, callers=read_callers(own, "webhook")),
            *metrics_listen,
        ],
        certificate=certificate,
        workers=own.workers,
        start=renewer.start if renewer else None,
        stop=renewer.stop if renewer else None,
    )


def _finder(kubeconfig: str, stack: ExitStack) -> FindMtgpuPod | None:
    """Return the function that reads MtgpuPods, or None if there is no API server.

    Each worker process connects to the API server when it reads the first MtgpuPod.
    """
    if not (kubeconfig or runs_in_cluster(kubeconfig)):
        return None
    api = Api.connect(kubeconfig, timeout=SECONDS)
    stack.callback(api.close)
    return make_finder(api)
