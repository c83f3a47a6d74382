"""The command lines and the environments of mgpu's processes in a one-machine cluster.

`playground.cluster` starts the processes. All files of the processes are in the folder of the cluster.
"""

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from playground import mps_control
from playground.nodes import NodeSpec

_COMPONENT_SETTINGS = {
    "dra": {"MGPU_DRA__ENABLED": "true"},
    "dra-convert": {"MGPU_DRA__CONVERT": "true"},
    "dra-whole-cards": {"MGPU_DEVICEPLUGIN__WHOLECARDS": "dra"},
}
"""The environment variables that components add to the containers of mgpu's processes."""


def kubeconfig(folder: Path, user: str) -> Path:
    """Return the kubeconfig of a user, such as one of the processes."""
    return folder / f"{user}.kubeconfig"


def cards_file(folder: Path, node: str) -> Path:
    """Return the file with the simulated cards of a node."""
    return folder / node / "cards.json"


def cri_socket(folder: Path, node: str) -> Path:
    """Return the socket of the container runtime of a node."""
    return folder / node / "cri.sock"


def agent_name(node: str) -> str:
    """Return the name of the process that is the agent of a node."""
    return f"deviceplugin-{node}"


class ProcessCommands:
    """How the processes are started. A process has a name: `webhook`, `scheduler`, or that of an agent (`agent_name`).

    Args:
        folder: The folder of the cluster.
        nodes: The nodes. Those with cards have an agent.
        certificates: The folder of the self-signed CA of each service.
        components: The components of the manifests that are installed.
        config: The settings file, or None.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[NodeSpec],
        certificates: Mapping[str, Path],
        components: Collection[str],
        config: Path | None,
    ) -> None:
        self._folder = folder
        self._agents = {agent_name(node.name): node for node in nodes if node.cards}
        self._certificates = certificates
        self._components = components
        self._config = config

    def all(self, ports: Mapping[str, int]) -> dict[str, list[str]]:
        """Return the command line of each process.

        Args:
            ports: The ports of `webhook`, `scheduler`, `extender`, `web` and of the agents.
        """
        local = ["--host", "127.0.0.1", "--port"]
        commands = {
            "webhook": ["webhook", *local, str(ports["webhook"]), *self._certificate_of("mgpu-webhook")],
            "scheduler": [
                *("scheduler", *local, str(ports["scheduler"]), "--no-leader-elect"),
                *("--extender-port", str(ports["extender"]), "--web-port", str(ports["web"])),
                *self._certificate_of("mgpu-scheduler"),
            ],
            **{name: self._agent(node.name, ports[name]) for name, node in self._agents.items()},
        }
        whole = {}
        for name, command in commands.items():
            shared = ["--kubeconfig", str(kubeconfig(self._folder, name))]
            shared += ["--config", str(self._config.resolve())] if self._config else []
            whole[name] = [sys.executable, "-m", "mgpu.cli.main", *command, *shared]
        return whole

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process, with the variables that the components of the manifests add."""
        node = self._agents.get(name)
        own = self._agent_settings(node) if node is not None else {}
        found = (_COMPONENT_SETTINGS.get(component, {}) for component in sorted(self._components))
        added = {variable: value for settings in found for variable, value in settings.items()}
        return _inherited(self._folder) | own | added

    def _certificate_of(self, service: str) -> tuple[str, str]:
        return ("--self-signed-dir", str(self._certificates[service]))

    def _agent(self, node: str, port: int) -> list[str]:
        root = self._folder / node
        files = ["--cards", str(cards_file(self._folder, node))]
        files += ["--kubelet-dir", str(root), "--cdi-dir", str(root / "cdi")]
        return ["deviceplugin", "--node", node, *files, "--health-port", str(port)]

    def _agent_settings(self, node: NodeSpec) -> dict[str, str]:
        control = shlex.join([sys.executable, "-S", "-E", mps_control.__file__])
        root = self._folder / node.name
        files = {"MPSDIR": str(root / "mps"), "MPSCONTROL": control, "LIMITSDIR": str(root / "limits")}
        files["CRISOCKET"] = str(cri_socket(self._folder, node.name))
        files["MPSREQUIREMOUNTS"] = "false"  # mounts need root, and would outlive the cluster
        if node.nvidia_plugin:
            files["WHOLECARDS"] = "nvidia"
        return {f"MGPU_DEVICEPLUGIN__{key}": value for key, value in files.items()}


def _inherited(folder: Path) -> dict[str, str]:
    """Return this process's environment without the variables that would give a child another cluster or settings.

    The children create their temporary files in `folder`, because a process that is killed cannot remove its files.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KUBERNETES_", "MGPU_", "KUBECONFIG"))}
    return kept | {"TMPDIR": str(folder)}
