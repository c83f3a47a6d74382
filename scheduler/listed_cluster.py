"""Fills a cluster cache from lists of objects, for the commands that run the scheduler's code without a scheduler."""

from mgpu.cli.cluster_objects import ClusterLists
from scheduler.cluster.cache import ClusterCache


def fill_cache(state: ClusterCache, lists: ClusterLists) -> list[str]:
    """Pass all objects on to the cache, as the scheduler's watches do. Return the sorted names of the nodes."""
    names = []
    for raw in lists.nodes:
        state.node_changed(raw)
        names.append(str(raw["metadata"]["name"]))
    for rows, take in (
        (lists.devices, state.device_changed),
        (lists.configmaps, state.configmap_changed),
        (lists.mtgpupods, state.mtgpupods.mtgpupod_changed),
        (lists.pods, state.pod_changed),
    ):
        for raw in rows:
            take(raw)
    return sorted(names)
