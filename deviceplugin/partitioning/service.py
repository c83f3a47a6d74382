"""Creates and connects the parts that partition the cards of one node and serve the slices.

`deviceplugin.agent` creates one `PartitionService`, and `deviceplugin.advertised_resources` reads its `ids` and
`registrations`. The worker has a thread of its own; `SlicePlugins` runs on the event loop.
"""

from collections.abc import Callable
from pathlib import Path

from deviceplugin.mig.mig_driver import MigDriver
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.claimed_cards import ClaimedCards, Places
from deviceplugin.partitioning.mig_partitioner import MigPartitioner
from deviceplugin.partitioning.mps_partitioner import ConfigMap, MpsDaemons, MpsPartitioner
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.node_status import NodeStatusWriter
from deviceplugin.partitioning.partition_worker import PartitionInputs, PartitionWorker
from deviceplugin.partitioning.partitioner import Partitioner
from deviceplugin.partitioning.slice_plugins import SlicePlugins
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.registration import Registration
from mgpu.kube import Api
from mgpu.model.slice_names import MIG, MIG_CLAIMS, MPS
from mgpu.settings import Settings


class PartitionService:
    """The partitioning of one node. It partitions nothing if the dialect of slices is not enabled.

    Args:
        daemons: The MPS daemons; None if the container runtime has no CDI. No card is partitioned in that case.
        owned: A function that returns the places of the MIG instances that exist for claims (`ClaimedCards`).
    """

    def __init__(
        self,
        settings: Settings,
        api: Api,
        inputs: PartitionInputs,
        partitions: NodePartitions,
        driver: MigDriver,
        folder: Path,
        make_plugin: Callable[[str], Plugin],
        daemons: MpsDaemons | None,
        owned: Callable[[], Places] = frozenset,
    ) -> None:
        own_settings = settings.deviceplugin
        self._enabled = settings.dialects.slices.enabled
        self._partitions = partitions
        self._plugins = SlicePlugins(folder, make_plugin, inputs.pods)
        self._config = ConfigMap(api, own_settings.node, settings.dialects.slices, self.wake)
        manager = ModeManager(driver) if own_settings.mig_manager else None
        partitioners: dict[str, Partitioner] = {}
        if daemons is not None:
            partitioners[MIG] = MigPartitioner(driver, manager)
            partitioners[MIG_CLAIMS] = ClaimedCards(driver, manager, owned)
            partitioners[MPS] = MpsPartitioner(self._config, daemons, manager)
        status = NodeStatusWriter(api, own_settings.node, inputs.watch)
        self._worker = PartitionWorker(inputs, partitions, partitioners, self._plugins, status)

    def start(self) -> None:
        if self._enabled:
            self._worker.start()

    def stop(self) -> None:
        if self._enabled:
            self._worker.stop()
            self._config.stop()

    async def run(self) -> None:
        """Serve the resources of slices, until cancelled."""
        await self._plugins.run()

    def wake(self) -> None:
        """Make the worker reconcile soon. Thread-safe."""
        self._worker.wake()

    @property
    def is_stalled(self) -> bool:
        """Whether the worker's thread hangs or has ended. In that case the process should be restarted."""
        return self._enabled and self._worker.is_stalled

    @property
    def ids(self) -> int:
        """The number of offered device ids of slices, or the number of existing slices if that is larger."""
        state = self._partitions.state
        return max(self._plugins.count, len(state.existing) if state else 0)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return self._plugins.registrations
