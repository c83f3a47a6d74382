"""What runs on simulated cards, as their NVML sees it."""

from collections.abc import Mapping
from pathlib import Path

from deviceplugin.mig import state


class GpuClients:
    """nvml: the state file of the node's simulated NVML (`deviceplugin.mig.state`)."""

    def __init__(self, nvml: Path) -> None:
        self._nvml = nvml

    def unknown(self, env: Mapping[str, str]) -> str:
        """A MIG device that a container with this environment would see and that is not there; "": none."""
        wanted = [uuid for uuid in _seen(env) if uuid.startswith("MIG-")]
        modes = state.read_state(self._nvml).cards.values() if wanted else ()
        made = {compute.uuid for mode in modes for gpu in mode.instances for compute in gpu.compute}
        return next((uuid for uuid in wanted if uuid not in made), "")

    def start(self, pid: int, env: Mapping[str, str]) -> None:
        for uuid in _seen(env):
            state.register(self._nvml, uuid, pid)

    def end(self, pid: int, env: Mapping[str, str]) -> None:
        for uuid in _seen(env):
            state.deregister(self._nvml, uuid, pid)

    def reboot(self) -> None:
        state.reboot(self._nvml)


def _seen(env: Mapping[str, str]) -> list[str]:
    """The UUIDs of the cards and MIG devices."""
    return [uuid for uuid in env.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if uuid.startswith(("GPU-", "MIG-"))]
