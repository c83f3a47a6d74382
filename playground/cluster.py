"""Runs a cluster on one machine.

The playground's API server, the controllers, the scheduling loop and the kubelets run in this process. mgpu's processes
and a real API server are its children. All files are in one temporary folder, which is removed when the context of the
`Cluster` ends. All TCP servers listen on loopback. `mgpu demo`, `mgpu playground`, benchmarks and tests create a
`Cluster`.
"""

import dataclasses
import json
import logging
import os
import secrets
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mgpu import dialects
from mgpu.cli.process_settings import read_settings
from mgpu.cli.scheduler_source import SERVICE
from mgpu.kube import Api, ApiError
from mgpu.model.node_slices import EXISTING
from mgpu.model.slice_names import MIG, MPS
from mgpu.serving.certificates import CA
from playground.agent_pods import agent_pod, running_at
from playground.apiserver import ApiServer, Request, Served, User, self_signed, write_kubeconfig
from playground.container_runtime import GpuClients, Runtime
from playground.controller_manager import ControllerManager
from playground.cri import Cri
from playground.installation import authorities, config_map, install, record_keys
from playground.kubelet import Kubelet, KubeletConfig
from playground.managed_resources import MANAGED
from playground.nodes import NodeSpec, make_nodes
from playground.nvidia_device_plugin import NvidiaPlugin
from playground.process_commands import ProcessCommands, agent_name, cards_file, cri_socket, kubeconfig
from playground.processes import Process, StartError, free_port, own_address
from playground.realapi import real_api_server, requests_in
from playground.scheduling import Extender, Scheduling

ASSETS = "KUBEBUILDER_ASSETS"
_NAMESPACE = "mgpu-system"
_WHOLE_CARDS = "nvidia.com/gpu"
_TOKEN_SECONDS = 24 * 3600
OURS = tuple(f"system:serviceaccount:{_NAMESPACE}:mgpu-{name}" for name in ("webhook", "scheduler", "deviceplugin"))
"""The service accounts of mgpu's processes, to which RBAC applies."""
_WEIGHT = 5  # the factor of the extender's scores
_START_SECONDS = 120.0


class Cluster:
    """A cluster that is ready inside `with Cluster([...]) as cluster:`, and is stopped and removed when the block ends.

    If a process does not start, entering the context raises StartError with the end of its log.

    Args:
        nodes: The nodes. By default there are two nodes with four cards each.
        config: A settings file for mgpu's processes.
        extender: Whether the scheduling loop calls mgpu's extender.
        assets: The directory of the etcd and kube-apiserver binaries to run. If it is "", the playground's own API
            server runs. If it is None, the environment variable KUBEBUILDER_ASSETS is used, or "" if it is not set.
        kubelet: Further fields for the KubeletConfig of every node.
        controllers: Whether the playground's controllers and scheduling loop run. If they do not, the caller runs real
            ones.
        components: The components of the manifests that are installed beside the base, such as `dra`.

    Attributes:
        api: The administrator's connection.
        url: The URL of the API server.
        folder: The temporary folder.
        logs: The folder with the logs of this process and of mgpu's processes.
        components: The names of the components that are installed.
        certificates: The folder of the self-signed CA of each of mgpu's services, by the name of the service.
        processes: mgpu's processes by name: `webhook`, `scheduler`, and `deviceplugin-NODE` for each node with cards.
        kubelets: The kubelets by the names of their nodes.
        scheduling: The scheduling loop that was started last.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec] | None = None,
        *,
        config: Path | None = None,
        extender: bool = True,
        assets: str | None = None,
        kubelet: Mapping[str, Any] | None = None,
        controllers: bool = True,
        components: Collection[str] = (),
    ) -> None:
        self.nodes = tuple(make_nodes(2, 4) if nodes is None else nodes)
        self.assets = os.environ.get(ASSETS, "") if assets is None else assets
        self._config = config
        self._with_extender = extender
        self._kubelet_options = dict(kubelet or {})
        self._with_controllers = controllers
        self.components = frozenset(components)
        self._stack = ExitStack()
        self._ports: dict[str, int] = {}
        self._requests: Callable[[], frozenset[Request]] = frozenset
        self._served: Served | None = None
        self.certificates: dict[str, Path] = {}
        self._offered = {node.name: self._offers_of(node) for node in self.nodes}
        self.processes: dict[str, Process] = {}
        self.kubelets: dict[str, Kubelet] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def connect(self, user: str = "admin") -> Api:
        """Return a new connection, which the caller must close.

        Args:
            user: The user to connect as: `admin`, `webhook`, `scheduler`, `deviceplugin`, `kube-scheduler`, `kubelet`
                or `kube-controller-manager`.
        """
        return Api.connect(str(self.kubeconfig_of(user)), timeout=30.0)

    def kubeconfig_of(self, user: str) -> Path:
        """Return the kubeconfig of one of the users that `connect` lists."""
        return kubeconfig(self.folder, user)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for kubectl."""
        return self.kubeconfig_of("admin")

    @property
    def extender_url(self) -> str:
        """The base URL of mgpu's extender."""
        return f"http://127.0.0.1:{self._ports['extender']}"

    def port(self, name: str) -> int:
        """Return the port of a server.

        Args:
            name: `webhook`, `scheduler` (the admission of bindings), `extender`, `web` (the scheduler's web page) or
                `deviceplugin-NODE` (the health probes of a node agent).
        """
        return self._ports[name]

    @property
    def page_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['web']}/"

    def nvml_state(self, node: str) -> Path:
        """Return the file with the MIG modes and instances of a node's simulated cards (`playground.nvml_state`)."""
        return self.folder / node / "cards.mig.json"

    def requests(self) -> frozenset[Request]:
        """Return the requests that mgpu's processes have sent to the API server, including the refused ones.

        RBAC gives the processes the rights in manifests/base/rbac.yaml and no others.
        """
        return self._requests()

    def restart(self, name: str) -> None:
        """Start a stopped or killed process again, and wait until it is ready."""
        self.processes[name].start()
        self.wait_ready(name)

    def kill_api_server(self) -> None:
        """Stop the playground's API server. It keeps its objects in memory for `start_api_server`.

        Raises StartError if the cluster runs a real API server.
        """
        self._own_api_server().kill()

    def start_api_server(self) -> None:
        self._own_api_server().start()

    def start_scheduling(self) -> None:
        """Start a new scheduling loop. It does not know which pods an earlier loop was about to bind."""
        extenders = [Extender(self.extender_url, weight=_WEIGHT, managed=MANAGED)]
        api = self._scheduling_api
        self.scheduling = Scheduling(api, extenders if self._with_extender else (), backoff=(0.2, 2.0))
        self.scheduling.start()

    def wait_ready(self, name: str) -> None:
        """Wait until one of `processes` passes its readiness probe. For the scheduler, wait until it leads.

        Raises StartError if the process ends first or is not ready in time.
        """
        self.processes[name].wait("ready", lambda: self._ready(name), _START_SECONDS)

    def wait_offers(self, node: str) -> None:
        """Wait until the node's status lists the resources of its cards. Raises StartError like `wait_ready`."""
        agent = self.processes[agent_name(node)]
        agent.wait("its cards are offered", lambda: self._offers(node), _START_SECONDS)

    def log_of(self, namespace: str, pod: str, container: str) -> str:
        """Return a container's log: its environment variables and mounts. Raises KeyError if it has not started."""
        started = {
            max(c.started for c in found): kubelet
            for kubelet in self.kubelets.values()
            if (found := [c for c in kubelet.runtime.containers() if (c.namespace, c.pod) == (namespace, pod)])
        }
        if not started:
            raise KeyError(f"container {container!r} of {namespace}/{pod} has not started")
        # Several pods may have had this name on different nodes. The newest one counts.
        return started[max(started)].runtime.logs(namespace, pod, container)

    def _start(self, stack: ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mgpu-")))
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        stack.enter_context(_logging_to(self.logs / "playground.log"))
        users = _users() | self._agent_users()
        tokens = {secrets.token_hex(16): user for user in users.values()}
        self.url, ca = self._api_server(stack, tokens)
        self._ca = ca.read_bytes()
        for (name, _), token in zip(users.items(), tokens, strict=True):
            write_kubeconfig(self.kubeconfig_of(name), self.url, self._ca, token)
        self.api = self.connect()
        stack.callback(self.api.close)
        _create_namespace(self.api)
        servers = (
            "webhook",
            "scheduler",
            "extender",
            "web",
            *(agent_name(node.name) for node in self.nodes if node.cards),
        )
        self._ports |= {name: free_port() for name in servers} | self._ports
        services = {"mgpu-webhook": self._ports["webhook"], "mgpu-scheduler": self._ports["scheduler"]}
        self.certificates = authorities(self.folder)
        bundles = {name: (path / CA).read_bytes() for name, path in self.certificates.items()}
        install(self.api, services, bundles, self.components)
        if self._with_controllers:
            self._start_controllers(stack)
        for node in self.nodes:
            self._start_kubelet(node, stack)
        self._start_processes(stack)
        if not self._with_controllers:
            return
        self._scheduling_api = self.connect("kube-scheduler")
        stack.callback(self._scheduling_api.close)
        self.start_scheduling()
        stack.callback(lambda: self.scheduling.stop())

    def _agent_users(self) -> dict[str, User]:
        """Return a user for each agent, whose token is bound to its node (`_write_bound_kubeconfig` if it is real)."""
        agent = _users()["deviceplugin"]
        nodes = [node.name for node in self.nodes if node.cards and not self.assets]
        return {agent_name(name): dataclasses.replace(agent, node=name) for name in nodes}

    def _api_server(self, stack: ExitStack, tokens: Mapping[str, User]) -> tuple[str, Path]:
        folder = self.folder / "api"
        folder.mkdir()
        if self.assets:
            self._requests = lambda: requests_in(folder)
            return stack.enter_context(real_api_server(Path(self.assets), folder, tokens, OURS))
        certificate, key = self_signed(folder)
        server = ApiServer(tokens=tokens, restricted=OURS, log_source=self.log_of)
        self._ports["scheduler"] = free_port()
        server.services.urls[_NAMESPACE, SERVICE] = f"https://127.0.0.1:{self._ports['scheduler']}"
        self._requests = lambda: server.requests
        self._served = Served(server, tls=(certificate, key))
        stack.callback(self._served.close)
        return self._served.start(), Path(certificate)

    def _own_api_server(self) -> Served:
        if self._served is None:
            raise StartError("a real API server cannot be stopped and started")
        return self._served

    def _start_controllers(self, stack: ExitStack) -> None:
        api = self.connect("kube-controller-manager")
        stack.callback(api.close)
        controllers = ControllerManager(api)
        stack.callback(controllers.stop)
        controllers.start()

    def _start_kubelet(self, node: NodeSpec, stack: ExitStack) -> None:
        root = self.folder / node.name
        (root / "cdi").mkdir(parents=True)
        cards_file(self.folder, node.name).write_text(json.dumps(list(node.cards)))
        config = KubeletConfig(node.name, root, labels=node.all_labels, **self._kubelet_options)
        api = self.connect("kubelet")
        runtime = Runtime(root / "cdi", GpuClients(self.nvml_state(node.name)))
        kubelet, cri = Kubelet(config, api, runtime), Cri(cri_socket(self.folder, node.name), runtime)
        stack.callback(api.close)
        stack.callback(cri.stop)
        cri.start()
        stack.callback(kubelet.stop)
        kubelet.start()
        self.kubelets[node.name] = kubelet
        if node.nvidia_plugin:
            # The plugin serves whole cards beside the node agent, which runs with the setting `wholeCards: nvidia`.
            plugin = NvidiaPlugin(config.plugins, [card.uuid for card in node.known_cards()])
            stack.callback(plugin.stop)
            plugin.start()

    def _start_processes(self, stack: ExitStack) -> None:
        # Start all processes before waiting for one, so that their Python imports, which take longest, run in parallel.
        commands = ProcessCommands(self.folder, self.nodes, self.certificates, self.components, self._config)
        keys = record_keys(self.folder / "records")
        self.api.create(f"/api/v1/namespaces/{_NAMESPACE}/configmaps", config_map(keys))
        for name, command in commands.all(self._ports).items():
            environ = commands.environment(name) | keys
            self.processes[name] = Process(name, command, self.logs / f"{name}.log", environ)
        stack.callback(self._stop_processes)
        self._create_agent_pods()
        for process in self.processes.values():
            process.start()
        for name in self.processes:
            self.wait_ready(name)
        for node in self.nodes:
            if node.cards:
                self.wait_offers(node.name)

    def _create_agent_pods(self) -> None:
        """Create the Pods of the agents, whose addresses the commands and the web page need."""
        pods = f"/api/v1/namespaces/{_NAMESPACE}/pods"
        status = {"status": running_at(own_address())}
        for node in self.nodes:
            if node.cards:
                pod = self.api.create(pods, agent_pod(node.name, self._ports[agent_name(node.name)]))
                self.api.patch(f"{pods}/{pod['metadata']['name']}/status", status)
                if self.assets:
                    self._write_bound_kubeconfig(node.name, pod)

    def _write_bound_kubeconfig(self, node: str, pod: Mapping[str, Any]) -> None:
        """Write the kubeconfig of an agent with a token that is bound to its Pod, and so to its node.

        A token file of a real API server cannot bind tokens.
        """
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        request = {"spec": {"boundObjectRef": bound, "audiences": [], "expirationSeconds": _TOKEN_SECONDS}}
        path = f"/api/v1/namespaces/{_NAMESPACE}/serviceaccounts/mgpu-deviceplugin/token"
        token = self.api.create(path, request)["status"]["token"]
        write_kubeconfig(self.kubeconfig_of(agent_name(node)), self.url, self._ca, token)

    def _stop_processes(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.stop()

    def _ready(self, name: str) -> bool:
        port = self._ports["extender" if name == "scheduler" else name]
        # A readiness probe need not verify the certificate. A context that verifies it takes 70 ms to load its CAs.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        scheme = "https" if name == "webhook" else "http"
        probe = "leads" if name == "scheduler" else "readyz"
        try:
            with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/{probe}", context=context, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _offers(self, node: str) -> bool:
        found = self.api.get(f"/api/v1/nodes/{node}")
        there = (found.get("status") or {}).get("allocatable") or {}
        annotations = found["metadata"].get("annotations") or {}
        has_slices = any(spec.name == node and spec.partitioning in (MIG, MPS) for spec in self.nodes)
        if has_slices and EXISTING not in annotations:
            return False
        return all(there.get(name, "0") != "0" for name in self._offered[node])

    def _offers_of(self, node: NodeSpec) -> set[str]:
        """Return the resources that the node's status must list before the cluster is ready.

        Raises BadObject if the settings file is invalid.
        """
        settings = read_settings(self._config, {}, {})
        offers = (d.resources(node.whole_cards(), settings) for d in dialects.enabled(settings))
        names = {r.name for resources in offers for r in resources if any(amount for _, amount in r.amounts)}
        # With this component kube-scheduler serves whole cards by claims, so no agent offers them.
        return names - {_WHOLE_CARDS} if "dra-whole-cards" in self.components else names


def _users() -> dict[str, User]:
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{_NAMESPACE}")
    accounts = {account.rpartition(":mgpu-")[2]: User(account, groups) for account in OURS}
    return {
        "admin": User("kubernetes-admin", ("system:masters",)),
        "kube-scheduler": User("system:kube-scheduler"),
        "kube-controller-manager": User("system:kube-controller-manager"),
        "kubelet": User("system:node:playground", ("system:nodes",)),
        **accounts,
    }


def _create_namespace(api: Api) -> None:
    """Create mgpu's namespace if it does not exist. The playground's own API server has it from the start."""
    try:
        api.create("/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}})
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise StartError(f"namespace {_NAMESPACE}: {error}") from error


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
