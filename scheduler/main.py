"""`mgpu scheduler`: settings, the API server, certificates, gunicorn."""

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
from scheduler.api.collector import ClusterCollector
from scheduler.runtime import Process

EXAMPLES = """
\b
Examples:
  # In a cluster: makes its certificate under the CA in its Secret
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
@click.option("--extender-host", help="Address of the extender.  [default: 127.0.0.1]")
@click.option("--extender-port", type=int, help="Its port; 0: any free one.  [default: 8888]")
@click.option("--metrics-port", type=int, help="Port of /metrics and probes, plain HTTP; -1: none.  [default: -1]")
@click.option("--web-port", type=int, help="Port of the web page on loopback; -1: none.  [default: -1]")
@click.option("--cert-dir", help="Serve tls.crt and tls.key from here, and follow them.")
@click.option("--self-signed-dir", help="Keep the self-made certificate here.  [default: a private directory]")
@click.option("--names", help="More DNS names and addresses for the self-made certificate, with commas between.")
@click.option("--leader-elect/--no-leader-elect", default=None, help="One of several replicas decides.  [default: on]")
@click.option("--card-policy", type=click.Choice(CARD_POLICIES), help="Holds over the settings'.")
@click.option("--node-policy", type=click.Choice(NODE_POLICIES), help="Holds over the settings'.")
@click.option("--memory-unit", type=click.Choice(UNITS, case_sensitive=False), help="Of gpu-mem.  [default: GiB]")
@click.option("--kubeconfig", default="", help="The cluster to serve.  [default: the one this runs in]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def command(config: Path | None, kubeconfig: str, log_level: str, **flags: str | int | bool | None) -> None:
    """Serve the scheduler: binding admission and extender.

    Decides the cards of every GPU pod in the binding that gives it its node. Prints one line per address,
    `serving https on HOST:PORT`, when it accepts connections; logs are JSON lines on stderr.
    """
    logs.set_up_logging(log_level)
    settings = read_settings(config, os.environ, flags, "scheduler")
    with ExitStack() as stack:
        run(settings, kubeconfig, stack)


def run(settings: Settings, kubeconfig: str, stack: ExitStack) -> None:
    """Serve until told to stop. `stack`: what is to be undone afterwards."""
    own = settings.scheduler
    # Not shared with the certificates' thread below: its pool is used only in the worker, after the fork.
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

    serve(
        listeners(
            process.state,
            process.decider,
            process.filter,
            process.preemption,
            api,
            settings,
            process,
            process.state.mtgpupods.objects,
            ClusterCollector(process.state, process, process.state.mtgpupods.objects),
        ),
        certificate=certificate,
        workers=1,
        start=start,
        end=process.end,
        stop=stop,
    )
