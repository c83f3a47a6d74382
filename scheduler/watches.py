"""The watches of a scheduler process: which objects it follows, and whether it knows enough of them to answer.

`scheduler.runtime` creates the `Watches`, starts them after it has tried to become the leader, and asks them before
this replica answers or decides. A replica answers once all required watches have delivered their first list. It is not
ready while one of them has been broken for some time.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import DEVICE_API
from mgpu.model.errors import RetryLater
from mgpu.model.gangs import POD_GROUP_PATHS
from mgpu.model.resource_claims import CLAIMS, CLASSES
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.disruption_budgets import PATH as BUDGETS_PATH
from scheduler.decisions.disruption_budgets import DisruptionBudgets
from scheduler.partitioning.partition_controller import PartitionController
from scheduler.partitioning.plan_writer import PlanWriter

_SILENT_SECONDS = 30.0
"""How long a watch may be broken before this replica is not ready."""
_MISSING_SECONDS = 60.0
"""The longest pause before a kind of PodGroups that the cluster does not have is listed again. Until then
`PodGroupReader` reads the groups that pods name."""
_WATCH_SECONDS = 30
"""The duration of a watch request.

A half-open connection delivers no events until its request ends, and the scheduler must not decide on outdated objects
for long.
"""


class Watches:
    """All watches of one replica. The constructor starts no threads and sends no requests.

    Args:
        disruptions: The PodDisruptionBudgets for preemption.
        planning: The partition controller, which has the sharing configurations of slices.
        plan_writer: Says where the ConfigMap of the sharing configurations is.
    """

    def __init__(
        self,
        api: Api,
        settings: Settings,
        state: ClusterCache,
        disruptions: DisruptionBudgets,
        planning: PartitionController,
        plan_writer: PlanWriter,
    ) -> None:
        self._required = _required(api, settings, state)
        # This replica answers without waiting for these watches. Without PodDisruptionBudgets, victims are chosen as if
        # there were none. A ConfigMap is read again before it is written. The pods of an unknown PodGroup are placed
        # one by one.
        watch = partial(Reflector, watch_seconds=_WATCH_SECONDS, optional=True)
        configs = planning.configs
        self._optional = {
            "budgets": watch(api, BUDGETS_PATH, disruptions.changed, disruptions.gone),
            "slice-configs": watch(api, plan_writer.maps, configs.changed, configs.gone, plan_writer.only_map),
        }
        gangs = state.gangs
        for source, path in POD_GROUP_PATHS.items():
            changed, gone = (partial(act, source) for act in (gangs.pod_group_changed, gangs.pod_group_gone))
            # Most clusters have one of these APIs at most.
            self._optional[f"podgroups.{source}"] = watch(api, path, changed, gone, missing_seconds=_MISSING_SECONDS)

    def all(self) -> Mapping[str, Reflector]:
        """Return all watches by the names under which the metrics show them."""
        return {**self._required, **self._optional}

    def start(self) -> None:
        for watch in self.all().values():
            watch.start()

    def stop(self) -> None:
        for watch in self.all().values():
            watch.stop()

    def wait_synced(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds for each of the awaited watches, and return whether all are in sync."""
        return all(watch.wait_synced(timeout) for _, watch in self._awaited())

    def refresh(self, names: Collection[str], timeout: float) -> bool:
        """List again for those awaited watches that have these names, and return whether all lists have finished."""
        return all(watch.refresh(timeout) for name, watch in self._awaited() if name in names)

    def not_ready_reason(self) -> str | None:
        """Return why this replica is not ready, or None."""
        for name, watch in self._awaited():
            if not watch.synced:
                return f"not in sync yet: {name}"
            if watch.broken_for > _SILENT_SECONDS:
                return f"the API server has not answered for {watch.broken_for:.0f} s: {name}"
        return None

    def check_synced(self) -> None:
        """Raise RetryLater while the cache is not complete yet."""
        for name, watch in self._awaited():
            if not watch.synced:
                raise RetryLater(f"not in sync yet: {name}")

    def knows_mtgpupods(self) -> bool:
        """Return whether this process may read MtgpuPods and has read them."""
        watch = self._required["mtgpupods"]
        return watch.synced and not watch.forbidden

    def _awaited(self) -> Iterator[tuple[str, Reflector]]:
        """Yield the watches that must be in sync.

        The watch of MtgpuPods is left out if this process has been forbidden to read them for some time. It then serves
        no MtgpuPods, and knows those that have a card from their Pods and occupy pods. It does not give up at once,
        because an API server that has just started may forbid a request that it allows later.
        """
        for name, watch in self._required.items():
            if name != "mtgpupods" or not watch.forbidden or watch.broken_for <= _SILENT_SECONDS:
                yield name, watch


def _required(api: Api, settings: Settings, state: ClusterCache) -> dict[str, Reflector]:
    """Return the watches that must be in sync before this replica answers, by their names in the metrics."""
    mtgpupods = state.mtgpupods
    watch = partial(Reflector, api, watch_seconds=_WATCH_SECONDS)
    watches = {
        "nodes": watch("/api/v1/nodes", state.node_changed, state.node_gone),
        "devices": watch(f"/apis/{DEVICE_API}/devices", state.device_changed, state.device_gone, optional=True),
        "pods": watch("/api/v1/pods", state.pod_changed, state.pod_gone),
        "mtgpupods": watch(mtgpu.COLLECTION, mtgpupods.mtgpupod_changed, mtgpupods.mtgpupod_gone, optional=True),
    }
    if settings.dra.enabled:
        claims = state.claims
        watches["claims"] = watch(CLAIMS, claims.claim_changed, claims.claim_gone)
        watches["deviceclasses"] = watch(CLASSES, claims.class_changed, claims.class_gone)
    for lists in dialects.unhealthy_card_lists(settings):
        path = f"/api/v1/namespaces/{lists.namespace}/configmaps"
        watches["configmaps"] = watch(path, state.configmap_changed, state.configmap_gone, optional=True)
    return watches
