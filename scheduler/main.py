"""Runs `mgpu scheduler`: reads the settings, connects to the API server, prepares certificates and starts gunicorn.

Threads must not start before gunicorn's fork, because they would not exist in the worker. So `start` starts them.
"""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import click

from mgpu.cli.certificate import prepare_certificate
from mgpu.cli.process_settings import UNITS, read_settings
from mgpu.kube import Api
from mgpu.serving import logs
from mgpu.serving.record_keys import make_record_verifier
from mgpu.serving.server import serve
from mgpu.settings import CARD_POLICIES, NODE_POLICIES, Settings
from scheduler.api.app import listeners
from scheduler.runtime import Process

EXAMPLES = """
\b
Examples:
  # In a cluster, with a certificate that the process signs with the CA in its Secret
  mgpu scheduler --config /etc/mgpu/mgpu.yaml
\b
  # In a cluster, with cert-manager's certificate
  mgpu scheduler --cert-dir /tls
\b
  # Outside of a cluster, as the only replica, without a Lease; the first lines of output name the free ports
  mgpu scheduler --kubeconfig ~/.kube/config --host 127.0.0.1 --port 0 --extender-port 0 --no-leader-elect
"""


@click.command(epilog=EXAMPLES)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--host", help="Address of the binding admission (HTTPS).  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Port of the binding admission; 0 means any free port.  [default: 8444]")
@click.option("--extender-host", help="Address of the extender.  [default: 127.0.0.1]")
@click.option("--extender-port", type=int, help="Port of the extender; 0 means any free port.  [default: 8888]")
@click.option(
    "--metrics-port", type=int, help="Port of /metrics and the probes, by plain HTTP; -1 means none.  [default: -1]"
)
@click.option("--web-port", type=int, help="Port of the web page on loopback; -1 means none.  [default: -1]")
@click.option("--cert-dir", help="Directory with tls.crt and tls.key, which are reloaded when they change.")
@click.option("--self-signed-dir", help="Directory for the self-signed certificate.  [default: a private one]")
@click.option("--names", help="Further DNS names and addresses for the self-signed certificate, comma-separated.")
@click.option(
    "--leader-elect/--no-leader-elect",
    default=None,
    help="Elect a leader among the replicas; only the leader decides.  [default: on]",
)
@click.option("--card-policy", type=click.Choice(CARD_POLICIES), help="Card policy; it overrides the settings.")
@click.option("--node-policy", type=click.Choice(NODE_POLICIES), help="Node policy; it overrides the settings.")
@click.option("--memory-unit", type=click.Choice(UNITS, case_sensitive=False), help="Unit of gpu-mem.  [default: GiB]")
@click.option("--kubeconfig", default="", help="Kubeconfig of the cluster.  [default: the cluster that this runs in]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def command(config: Path | None, kubeconfig: str, log_level: str, **flags: str | int | bool | None) -> None:
    """Serve the scheduler: binding admission and extender.

    The cards of a GPU pod are decided in the binding to its node. The command prints `serving https on HOST:PORT` for
    each address when it accepts connections there. Logs are JSON lines on stderr.
    """
    logs.set_up_logging(log_level)
    settings = read_settings(config, os.environ, flags, "scheduler")
    with ExitStack() as stack:
        run(settings, kubeconfig, stack)


def run(settings: Settings, kubeconfig: str, stack: ExitStack) -> None:
    """Serve until a signal ends the process.

    Args:
        stack: Receives the resources that must be released afterwards.
    """
    own = settings.scheduler
    # This client must not send a request before the fork, because two processes would share the connection. So the
    # certificate is prepared with an API client of its own.
    api = Api.connect(kubeconfig)
    records = make_record_verifier(settings, signing=True)
    process = Process(settings, api, f"{socket.gethostname()}-{os.getpid()}", records)
    certificate, keeper = prepare_certificate(own, kubeconfig, stack)

    def start() -> None:
        process.start()
        if keeper:
            keeper.start()

    def stop() -> None:
        if keeper:
            keeper.stop()
        process.stop()

    serve(listeners(process), certificate=certificate, workers=1, start=start, end=process.end, stop=stop)
