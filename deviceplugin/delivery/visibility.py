"""Makes the cards of a container visible to it by mounts or device nodes, if the settings require it.

Usually the variable NVIDIA_VISIBLE_DEVICES suffices. The settings `deviceplugin.deviceList` and
`deviceplugin.deviceNodes` are for nodes on which NVIDIA Container Toolkit ignores the variable for unprivileged
containers, or is not installed (docs/nodes.md). The allocators call `Exposure.edits` for each container, and the agent
reports what `read_toolkit` returns.
"""

import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.delivery.cdi import Edits, Mount
from deviceplugin.pods.identity import VISIBLE, Refused, Target
from mgpu.model.cards import Card
from mgpu.model.slice_names import is_slice, place_of
from mgpu.settings import DevicePluginSettings
from mgpu.version import Toolkit

log = logging.getLogger(__name__)

_NULL = "/dev/null"
_LIST = "/var/run/nvidia-container-devices"
"""The folder of the mounts that request cards from NVIDIA's container toolkit.

If /dev/null is mounted in this folder under the UUID of a card or of a MIG device, and the toolkit's option
accept-nvidia-visible-devices-as-volume-mounts is true, the container gets that device. Such mounts take precedence over
the variable, which then only informs the application.

Source: nvidia-container-toolkit 1.9 and later, internal/config/image/cuda_image.go, VisibleDevices.
"""
_DRIVER_NODES = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
"""The device nodes of the driver itself. Which of them exist depends on the modules that are loaded."""
TOOLKIT_CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
_ACCEPTS_VARIABLE = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_ACCEPTS_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


@dataclass(frozen=True, slots=True)
class Exposure:
    """What containers get in addition to their environment.

    Attributes:
        mounts: Whether mounts name the cards (`deviceList: mounts`).
        nodes: Whether containers get the device nodes of their cards (`deviceNodes`).
        dev: The path of the host's /dev in the agent's container.
    """

    mounts: bool = False
    nodes: bool = False
    dev: Path = Path("/dev")

    def edits(self, target: Target, env: Mapping[str, str], cards: Sequence[Card], gpus: Sequence[Card]) -> Edits:
        """Return the environment `env` with the mounts and device nodes of its cards.

        Args:
            target: The container, which an error names.
            env: The environment of the container; NVIDIA_VISIBLE_DEVICES names its cards.
            cards: The GPUs of the node that are not partitioned, and its slices.
            gpus: All GPUs of the node.

        Raises:
            Refused: The device node of a card is missing.
        """
        visible = [uuid for uuid in env.get(VISIBLE, "").split(",") if uuid]
        if not visible:
            return Edits(env)
        mounts = tuple(Mount(_NULL, f"{_LIST}/{uuid}") for uuid in visible) if self.mounts else ()
        nodes = tuple(self._nodes(target, visible, [*cards, *gpus])) if self.nodes else ()
        return Edits(env, mounts, nodes)

    def _nodes(self, target: Target, visible: Sequence[str], devices: Sequence[Card]) -> Iterator[str]:
        """Yield the device nodes of the visible cards, of the cards of visible slices, and of the driver.

        A container with a MIG instance also needs device nodes in /dev/nvidia-caps. NVIDIA's container toolkit adds
        them.
        """
        own_devices = [device for device in devices if device.uuid in visible]
        indexes = {place_of(device.index)[0] if is_slice(device.type) else device.index for device in own_devices}
        cards = {device for device in devices if device.index in indexes and not is_slice(device.type)}
        for card in sorted(cards, key=lambda card: card.index):
            if card.minor is None or not (self.dev / f"nvidia{card.minor}").exists():
                missing = "known minor number" if card.minor is None else f"device node {self.dev}/nvidia{card.minor}"
                what = f"has no {missing}, which deviceplugin.deviceNodes requires"
                raise Refused(f"{target}: card {card.index} ({card.uuid}) {what}", target.gpu_pod.pod.uid)
            yield f"/dev/nvidia{card.minor}"
        yield from (f"/dev/{name}" for name in _DRIVER_NODES if (self.dev / name).exists())


def make_exposure(settings: DevicePluginSettings) -> Exposure:
    return Exposure(settings.device_list == "mounts", settings.device_nodes, Path(settings.dev_dir))


def read_toolkit(file: Path = TOOLKIT_CONFIG) -> Toolkit | None:
    """Return which kinds of requests NVIDIA's container toolkit accepts, or None if its configuration cannot be read.

    An option that is not set has the toolkit's default: the variable is accepted, and mounts are not (GetDefault in the
    toolkit's package internal/config).
    """
    try:
        config = tomllib.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("cannot read the configuration of NVIDIA's container toolkit, %s: %s", file, error)
        return None
    return Toolkit(config.get(_ACCEPTS_VARIABLE, True) is True, config.get(_ACCEPTS_MOUNTS, False) is True)
