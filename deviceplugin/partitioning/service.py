"""The parts that make and serve slices, put together for one node."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from deviceplugin.mig.mig_driver import MigDriver
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.config_map import ConfigMap
from deviceplugin.partitioning.mig_partitioner import MigCutter
from deviceplugin.partitioning.mps_partitioner import Daemons, MpsCutter
from deviceplugin.partitioning.node_status import Raw, Status
from deviceplugin.partitioning.partition_worker import Around, SliceWorker
from deviceplugin.partitioning.partitioner import Cut, Cutter
from deviceplugin.partitioning.slice_plugins import SlicePlugins
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.registration import Registration
from deviceplugin.pods.slice_usage import Users
from mgpu.kube import Api
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.node_slices import NO_SLICES, NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice
from mgpu.settings import Settings


class Slices:
    """`start`, `run` on the loop, `stop`. Where the dialect is not enabled, all cards are whole and nothing is done.

    folder: the kubelet's device-plugins folder. begin: makes a resource's plugin, on the loop. daemons: of MPS; None
    where the runtime has no CDI. saw: hears of an own write of the Node: before, after.
    """

    def __init__(
        self,
        settings: Settings,
        api: Api,
        around: Around,
        driver: MigDriver,
        folder: Path,
        begin: Callable[[str], Plugin],
        daemons: Daemons | None,
        saw: Callable[[Raw, Raw], None],
    ) -> None:
        own = settings.deviceplugin
        self._enabled = settings.dialects.slices.enabled
        self._plugins = SlicePlugins(folder, begin)
        self._config = ConfigMap(api, own.node, settings.dialects.slices, self.wake)
        manager = ModeManager(driver) if own.mig_manager else None
        cutters: dict[str, Cutter] = {MIG: _NoCdi(), MPS: _NoCdi()}
        if daemons is not None:
            cutters = {MIG: MigCutter(driver, manager), MPS: MpsCutter(self._config, daemons, manager)}
        self._worker = SliceWorker(around, cutters, self._plugins, Status(api, own.node, around.node, saw))

    def start(self) -> None:
        if self._enabled:
            self._worker.start()

    def stop(self) -> None:
        if self._enabled:
            self._worker.stop()
            self._config.stop()

    async def run(self) -> None:
        """Serves the slices' resources, until cancelled."""
        await self._plugins.run()

    def wake(self) -> None:
        """Something may have changed; from any thread."""
        self._worker.wake()

    @property
    def stalled(self) -> bool:
        return self._enabled and self._worker.stalled

    @property
    def are_told(self) -> bool:
        """Whether the Node says of this node's slices which pods have them; before the first look it still does."""
        state = self._worker.state
        return self._enabled and (state is None or state.mode != NO_SLICES.mode)

    @property
    def ids(self) -> int:
        """How many device ids there are of slices, or will be in a moment."""
        state = self._worker.state
        return max(self._plugins.count, len(state.made) if state else 0)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return self._plugins.registrations

    def devices(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """What containers can be started on: of these cards those that are not cut, and the slices as devices."""
        return self._worker.devices(gpus)

    def whole(self, gpus: Sequence[Card]) -> tuple[Card, ...] | None:
        """Of these cards those that other vocabularies are offered; None: it is not known yet."""
        if self._enabled and self._worker.state is None:
            return None
        return self._worker.whole(gpus)


class _NoCdi:
    """In place of a cutter."""

    def leave(self) -> None:
        """It has nothing."""

    def cut(
        self,
        found: NodeSlices,  # noqa: ARG002
        gpus: Sequence[Card],  # noqa: ARG002
        users: Callable[[Collection[Slice]], Users],  # noqa: ARG002
        held: Collection[int],  # noqa: ARG002
    ) -> Cut:
        raise RetryLater("no card is cut here: slices need a container runtime with CDI (deviceplugin.cdi)")
