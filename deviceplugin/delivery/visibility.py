"""How a container's runtime hears of its cards besides by NVIDIA_VISIBLE_DEVICES: `deviceList` and `deviceNodes`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.delivery.cdi import Edits
from deviceplugin.pods.identity import VISIBLE, Refused, Target
from mgpu.model.cards import Card
from mgpu.model.slice_names import is_slice, place_of
from mgpu.settings import DevicePluginSettings

_NULL, _LIST = "/dev/null", "/var/run/nvidia-container-devices"
"""/dev/null mounted there under a UUID asks NVIDIA's container toolkit for that card or MIG device, where its
accept-nvidia-visible-devices-as-volume-mounts is true. It looks there first, and where it finds any, never at the
variable (nvidia-container-toolkit, internal/config/image/cuda_image.go, VisibleDevices; 1.9 did the same): so that
keeps the UUIDs for the application. NVIDIA's own plugin puts the folder's name into it.
"""
_DRIVERS = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
"""The driver's own; which of them there are depends on its modules."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """mounts, nodes: whether containers get these. dev: where the host's /dev is seen from here."""

    mounts: bool = False
    nodes: bool = False
    dev: Path = Path("/dev")

    def edits(self, target: Target, env: Mapping[str, str], cards: Sequence[Card], gpus: Sequence[Card]) -> Edits:
        """What a container with this environment gets beside it.

        cards: those that are whole, and slices. gpus: all of the node's. Raises Refused where a card's node is missing.
        """
        visible = [uuid for uuid in env.get(VISIBLE, "").split(",") if uuid]
        if not visible:
            return Edits()
        mounts = tuple((_NULL, f"{_LIST}/{uuid}") for uuid in visible) if self.mounts else ()
        nodes = tuple(self._nodes(target, visible, [*cards, *gpus])) if self.nodes else ()
        return Edits(mounts=mounts, nodes=nodes)

    def _nodes(self, target: Target, visible: Sequence[str], devices: Sequence[Card]) -> Iterator[str]:
        """Of a slice its card's; what a MIG instance has of its own, below nvidia-caps, is left to the toolkit."""
        found = [device for device in devices if device.uuid in visible]
        on = {place_of(device.index)[0] if is_slice(device.type) else device.index for device in found}
        for card in sorted({d for d in devices if d.index in on and not is_slice(d.type)}, key=lambda card: card.index):
            name = "" if card.minor is None else f"nvidia{card.minor}"
            if not name or not (self.dev / name).exists():
                what = f"has no {self.dev / name}" if name else "has no device node of a known number"
                why = f"{target}: card {card.index} ({card.uuid}) {what}, and deviceplugin.deviceNodes is true"
                raise Refused(why, target.known.pod.uid)
            yield f"/dev/{name}"
        yield from (f"/dev/{name}" for name in _DRIVERS if (self.dev / name).exists())


def exposure_of(own: DevicePluginSettings) -> Exposure:
    """As the settings have it."""
    return Exposure(own.device_list == "mounts", own.device_nodes, Path(own.dev_dir))
