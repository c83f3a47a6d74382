"""How the container runtime learns which cards a container gets, beside NVIDIA_VISIBLE_DEVICES.

The settings `deviceplugin.deviceList` and `deviceplugin.deviceNodes` are for nodes where NVIDIA's container toolkit
ignores that variable for unprivileged containers, or where no toolkit is installed (docs/nodes.md). The toolkit's own
configuration says which of them it follows; the agent reports that for `mgpu doctor`.
"""

import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.delivery.cdi import Edits
from deviceplugin.pods.identity import VISIBLE, Refused, Target
from mgpu.model.cards import Card
from mgpu.model.slice_names import is_slice, place_of
from mgpu.settings import DevicePluginSettings
from mgpu.version import Toolkit

log = logging.getLogger(__name__)

_NULL = "/dev/null"
_LIST = "/var/run/nvidia-container-devices"
"""/dev/null mounted there under a UUID asks NVIDIA's container toolkit for that card or MIG device, if its
accept-nvidia-visible-devices-as-volume-mounts is true. The toolkit looks there first; if it finds any, it ignores the
variable, which then only informs the application (nvidia-container-toolkit, internal/config/image/cuda_image.go,
VisibleDevices; 1.9 did the same). NVIDIA's own plugin sets the variable to the folder's name instead.
"""
_DRIVER_NODES = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
"""The driver's own device nodes; which of them exist depends on its modules."""
TOOLKIT_CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
_ACCEPTS_VARIABLE = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_ACCEPTS_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


@dataclass(frozen=True, slots=True)
class Exposure:
    """What containers get beside their environment.

    mounts: whether cards are named by mounts (`deviceList: mounts`).
    nodes: whether containers get the device nodes of their cards (`deviceNodes`).
    dev: where the agent sees the host's /dev.
    """

    mounts: bool = False
    nodes: bool = False
    dev: Path = Path("/dev")

    def edits(self, target: Target, env: Mapping[str, str], cards: Sequence[Card], gpus: Sequence[Card]) -> Edits:
        """Return the mounts and device nodes of a container with this environment.

        Args:
            cards: the node's cards that are whole, and its slices.
            gpus: all GPUs of the node.

        Raises Refused if a card's device node is missing.
        """
        visible = [uuid for uuid in env.get(VISIBLE, "").split(",") if uuid]
        if not visible:
            return Edits()
        mounts = tuple((_NULL, f"{_LIST}/{uuid}") for uuid in visible) if self.mounts else ()
        nodes = tuple(self._nodes(target, visible, [*cards, *gpus])) if self.nodes else ()
        return Edits(mounts=mounts, nodes=nodes)

    def _nodes(self, target: Target, visible: Sequence[str], devices: Sequence[Card]) -> Iterator[str]:
        """Yield device nodes; of a slice its card's. The toolkit adds those of MIG instances, below nvidia-caps."""
        found = [device for device in devices if device.uuid in visible]
        indexes = {place_of(device.index)[0] if is_slice(device.type) else device.index for device in found}
        cards = {device for device in devices if device.index in indexes and not is_slice(device.type)}
        for card in sorted(cards, key=lambda card: card.index):
            if card.minor is None or not (self.dev / f"nvidia{card.minor}").exists():
                missing = (
                    "device node of a known number" if card.minor is None else str(self.dev / f"nvidia{card.minor}")
                )
                what = f"has no {missing}, and deviceplugin.deviceNodes is true"
                raise Refused(f"{target}: card {card.index} ({card.uuid}) {what}", target.gpu_pod.pod.uid)
            yield f"/dev/nvidia{card.minor}"
        yield from (f"/dev/{name}" for name in _DRIVER_NODES if (self.dev / name).exists())


def exposure_of(own: DevicePluginSettings) -> Exposure:
    """Return what the settings ask for."""
    return Exposure(own.device_list == "mounts", own.device_nodes, Path(own.dev_dir))


def read_toolkit(file: Path = TOOLKIT_CONFIG) -> Toolkit | None:
    """Return which requests NVIDIA's container toolkit follows; None if its configuration cannot be read from here.

    Missing keys have the toolkit's defaults (internal/config, GetDefault): the variable alone.
    """
    try:
        found = tomllib.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s: %s", file, error)
        return None
    return Toolkit(found.get(_ACCEPTS_VARIABLE, True) is True, found.get(_ACCEPTS_MOUNTS, False) is True)
