"""`mgpu playground`: the one-machine cluster, kept up for kubectl."""

import signal
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from mgpu.cli.setup import read_settings
from playground.cluster import Cluster
from playground.command import options, stopping, up
from playground.samples import EXAMPLES as FOLDER

EXAMPLES = """
\b
Examples:
  mgpu playground
  mgpu playground --nodes 2 --cards 8 --config mgpu.yaml
  KUBEBUILDER_ASSETS=~/envtest/bin mgpu playground      with a real kube-apiserver
"""


@click.command(epilog=EXAMPLES)
@options()
def command(nodes: int, cards: int, config: Path | None) -> None:
    """Keep a one-machine cluster up for kubectl, until Ctrl-C.

    API server, scheduling loop, kubelets and GPUs are simulated on this machine; the webhook, the scheduler and the
    node agents are the real processes. A container's log is its environment.
    """
    console = Console(highlight=False, soft_wrap=True)
    read_settings(config, {}, {})
    with stopping(interrupted=0), up(console, nodes, cards, config) as cluster:
        _tell(console, cluster)
        while True:
            signal.pause()


def _tell(console: Console, cluster: Cluster) -> None:
    console.print(
        Text.assemble("Ready. In another terminal:\n\n", (f"  export KUBECONFIG={cluster.kubeconfig}", "bold"))
    )
    console.print(Text(f"  kubectl get nodes\n  kubectl create -f {FOLDER / 'share.yaml'}\n  kubectl logs share"))
    console.print(Text(f"  kubectl create -f {FOLDER / 'mtgpupod.yaml'}\n  kubectl get mtgp\n  mgpu inspect\n"))
    console.print(Text(f"The cards as a web page: {cluster.page_url}\n"))
    console.print(Text(f"Logs are in {cluster.logs}. Ctrl-C stops and removes everything."))
