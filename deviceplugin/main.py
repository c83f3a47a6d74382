"""The command `mgpu deviceplugin`: reads the settings, validates them, and runs the agent.

Other modules of the agent read neither flags nor settings from the environment. Invalid settings must be reported
before the agent connects to the cluster.
"""

import asyncio
import gc
import logging
import os
import shlex
import signal
import socket
from functools import partial
from pathlib import Path

import click
import pynvml
from prometheus_client import CollectorRegistry

from deviceplugin.agent import Agent
from deviceplugin.agent_process import AgentProcess
from deviceplugin.allocation.whole_cards import CLAIMS
from deviceplugin.cards import CardSource
from deviceplugin.cards.nvml_cards import NvmlCards
from deviceplugin.cards.simulated_cards import SimulatedCards, simulated_mig, simulated_processes
from deviceplugin.dra.claim_registration import registration_socket, service_socket
from deviceplugin.handover.takeover import SOCKET
from deviceplugin.health import HealthServer
from deviceplugin.inventory.node_objects import NodeObjects
from deviceplugin.inventory.offers import id_resources
from deviceplugin.inventory.reporter import known_indexes
from deviceplugin.isolation.driver.memory_limits import MemoryLimits
from deviceplugin.kubelet.pod_resources import pod_resources_socket
from deviceplugin.metrics import REGISTRY, NodeCards
from deviceplugin.mig.mig_driver import MigDriver, NvmlMig
from deviceplugin.plugin.registration import socket_name
from deviceplugin.usage.usage_metrics import UsageMetrics
from deviceplugin.usage.usage_reader import UsageSource
from mgpu import dialects
from mgpu.cli.process_settings import read_settings
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.kube import Api
from mgpu.model.errors import BadObject, Problem
from mgpu.model.isolation import CHOICES
from mgpu.serving import logs
from mgpu.serving.metrics import CONTENT_TYPE, render_metrics
from mgpu.serving.record_keys import make_record_verifier
from mgpu.settings import DevicePluginSettings, Settings

_log = logging.getLogger(__name__)
_LONGEST_SLICE = "nvidia.com/mig-1g.100gb.me"
"""A resource of slices with a long name. The resources of slices are not known at the start, so the paths of their
sockets are checked with this name."""
_MAX_PATH = 107
"""The maximum length of a unix socket's path in bytes. `sun_path` has 108, including the terminating zero."""

EXAMPLES = """
\b
Examples:
  # On a node, as in the DaemonSet: with real cards, and the kubelet in /var/lib/kubelet
  mgpu deviceplugin --health-port 8080
\b
  # With simulated cards; the agent reads the file again when it changes
  echo '[{"count": 8, "model": "A100-SXM4-80GB", "memory": "80Gi"}]' > cards.yaml
  mgpu deviceplugin --node n1 --cards cards.yaml --kubeconfig ~/.kube/config
\b
  # Beside another kubelet
  mgpu deviceplugin --node n1 --cards cards.yaml --kubelet-dir /tmp/n1 --cdi-dir /tmp/n1/cdi
"""


@click.command(epilog=EXAMPLES)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--node", help="This node's name.  [default: $NODE_NAME, else the host's name]")
@click.option("--cards", help="File with simulated cards, YAML or JSON.  [default: NVML's cards]")
@click.option("--kubelet-dir", help="The kubelet's folder.  [default: /var/lib/kubelet]")
@click.option("--pod-resources", help="PodResources socket.  [default: pod-resources/kubelet.sock in --kubelet-dir]")
@click.option("--cdi-dir", help="Where the runtime looks for CDI specs.  [default: /var/run/cdi]")
@click.option("--cri-socket", help="CRI socket of the runtime.  [default: /run/containerd/containerd.sock]")
@click.option("--cdi/--no-cdi", default=None, help="Whether the runtime has CDI.  [default: --cdi]")
@click.option(
    "--whole-cards",
    type=click.Choice(["auto", "mgpu", "nvidia", "dra"]),
    help="Who serves nvidia.com/gpu: this agent, NVIDIA's plugin, or claims (dra).  [default: auto, detect it]",
)
@click.option(
    "--isolation",
    type=click.Choice(CHOICES),
    help="What holds containers to their shares (docs/isolation.md).  [default: none]",
)
@click.option(
    "--memory-unit",
    type=click.Choice(["GiB", "MiB"], case_sensitive=False),
    help="Unit of aliyun.com/gpu-mem.  [default: GiB]",
)
@click.option("--health-port", type=int, help="Port of /healthz, /readyz and /metrics; 0: none.  [default: 0]")
@click.option("--kubeconfig", default="", help="Kubeconfig of the cluster.  [default: in-cluster]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def command(config: Path | None, kubeconfig: str, log_level: str, **flags: str | int | None) -> None:
    """Run the node agent.

    Offers the node's cards to the kubelet, gives each container exactly the cards of its pod's allocation record, and
    reports the cards as the node's Device object. Stops on SIGTERM and SIGINT. Writes its log as JSON lines to stderr.
    """
    logs.set_up_logging(log_level)
    settings = _settings(config, flags)
    _simulated(settings.deviceplugin)  # reports an invalid file before the agent connects to the cluster
    records = make_record_verifier(settings, signing=False)
    api = Api.connect(kubeconfig)
    agents = AgentProcess(lambda: _agent(settings, api, records))
    health = _health(settings.deviceplugin, agents)
    try:
        asyncio.run(_run(agents))
    finally:
        if health:
            health.stop()


def _agent(settings: Settings, api: Api, records: RecordVerifier) -> Agent:
    """Create an agent with real or simulated cards. Raises BadObject."""
    own = settings.deviceplugin
    objects = NodeObjects(api, own.node)
    simulated = _simulated(own)
    if simulated is not None:
        source, driver = simulated
        found = simulated_processes(Path(own.cards), own.node)
        limits = None if found is None else MemoryLimits(found[0])
        return Agent(settings, objects, source, api, driver, records, _simulated_usage(own), limits)
    cards = NvmlCards(indexes=partial(known_indexes, api, own.node), partition_mode=objects.partition_mode)
    return Agent(settings, objects, cards, api, NvmlMig(), records, UsageSource(pynvml), MemoryLimits())


async def _run(process: AgentProcess) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    gc.collect()
    gc.freeze()  # so that a full collection, perhaps while a container starts, does not traverse all modules
    await process.run()


def _settings(config: Path | None, flags: dict[str, str | int | None]) -> Settings:
    settings = read_settings(config, os.environ, flags, "deviceplugin")
    own = settings.deviceplugin
    node = own.node or os.environ.get("NODE_NAME", "") or socket.gethostname().lower()
    _check_paths(own, settings)
    return settings.model_copy(update={"deviceplugin": own.model_copy(update={"node": node})})


def _check_paths(own: DevicePluginSettings, settings: Settings) -> None:
    """Raise BadObject if no dialect is enabled, the MPS command is invalid, or the path of a socket is too long."""
    if not any(dialects.enabled(settings)):
        raise BadObject([Problem("dialects", "none is enabled: there is no resource to serve")])
    _check_command(own.mps_control)
    _check_dra(settings)
    resources = {r.name for r in id_resources((), settings)}
    if settings.dialects.slices.enabled:
        resources.add(_LONGEST_SLICE)
    folder = Path(own.kubelet_dir) / "device-plugins"
    # An agent uses one of two socket names for each resource. The second one is longer.
    own_sockets = (socket_name(name, second=True) for name in sorted(resources))
    sockets = [("kubeletDir", folder / name) for name in ("kubelet.sock", SOCKET, *own_sockets)]
    sockets.append(("podResources", pod_resources_socket(own)))
    if settings.dra.enabled:
        kubelet_dir = Path(own.kubelet_dir)
        sockets += [("kubeletDir", path(kubelet_dir)) for path in (service_socket, registration_socket)]
    problems = [
        Problem(f"deviceplugin.{key}", f"{path} is too long for a unix socket ({_MAX_PATH} bytes at most)")
        for key, path in sockets
        if len(os.fsencode(path)) > _MAX_PATH
    ]
    if problems:
        raise BadObject(problems)


def _check_dra(settings: Settings) -> None:
    own = settings.deviceplugin
    if own.whole_cards == CLAIMS and not settings.dra.enabled:
        raise BadObject([Problem("deviceplugin.wholeCards", f"must not be {CLAIMS} unless dra.enabled is true")])
    if settings.dra.enabled and not own.cdi:
        raise BadObject([Problem("dra.enabled", "needs a container runtime with CDI, but deviceplugin.cdi is false")])


def _check_command(text: str) -> None:
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = []
    if not words:
        raise BadObject([Problem("deviceplugin.mpsControl", f"must be a command, not {text!r}")])


def _simulated(own: DevicePluginSettings) -> tuple[CardSource, MigDriver] | None:
    """Return simulated cards and their MIG driver, or None for real ones. Raises BadObject if the file is invalid."""
    if not own.cards:
        return None
    source = SimulatedCards(Path(own.cards), own.node)
    source.read()
    return source, simulated_mig(Path(own.cards), own.node)


def _simulated_usage(own: DevicePluginSettings) -> UsageSource | None:
    """Return the use of the simulated cards, or None if nothing simulates it."""
    found = simulated_processes(Path(own.cards), own.node)
    return None if found is None else UsageSource(*found)


def _health(own: DevicePluginSettings, agents: AgentProcess) -> HealthServer | None:
    port = own.health_port
    if not port:
        return None
    try:
        of_agent = CollectorRegistry()
        of_agent.register(NodeCards(lambda: agents.agent))
        of_agent.register(UsageMetrics(lambda: agents.agent, own.usage_series))
        metrics = partial(render_metrics, REGISTRY, of_agent)
        server = HealthServer(
            port,
            lambda: agents.agent.unhealthy_reason(),
            lambda: agents.agent.not_ready_reason(),
            metrics=metrics,
            content_type=CONTENT_TYPE,
        )
    except OSError as error:
        problem = Problem("deviceplugin.healthPort", f"cannot listen on {port}: {error.strerror}")
        raise BadObject([problem]) from error
    server.start()
    return server
