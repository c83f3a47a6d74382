"""Runs the scheduler's code on lists of objects, for commands that cannot ask a scheduler.

`mgpu inspect` needs it for gangs, and `mgpu explain` for the pod that it explains. Both import this module only then:
it imports the engine, which takes as long as a whole answer of the scheduler.
"""

import re
from collections.abc import Sequence
from itertools import chain

import click

from mgpu.cli import cluster_objects
from mgpu.cli.cluster_objects import ClusterLists
from mgpu.kube import Api
from mgpu.model.gangs import POD_GROUP_APIS, POD_GROUP_PATHS, gang_name
from mgpu.model.pods import read_pod
from mgpu.presentation.explanations import Explanation
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.overview import Overview
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.explanation import Explainer, NoSuchNode, NotCached, Raw
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks

_MOST_OUTLOOKS = 20
"""The most gangs for which the engine examines which members fit."""
_SIMPLE = re.compile(r"[-a-z0-9.]*")
"""Matches the names that need no escaping in a field selector. All valid names of nodes are among them."""


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
        (lists.classes, state.claims.class_changed),
        (lists.claims, state.claims.claim_changed),
    ):
        for raw in rows:
            take(raw)
    return sorted(names)


def incomplete_gangs(api: Api, settings: Settings, lists: ClusterLists, overview: Overview) -> Sequence[GangView]:
    """Return the gangs that are not complete, sorted by name, the first of them with their outlook."""
    waiting = frozenset(overview.pending)
    pods = (read_pod(raw) for raw in lists.pods if _key(raw) in waiting)
    names = {name for pod in pods if (name := gang_name(pod)) is not None}
    if not names:
        return ()
    state = ClusterCache(settings)
    nodes = fill_cache(state, lists)
    for source in sorted({name.source for name in names} & POD_GROUP_PATHS.keys()):
        for raw in cluster_objects.pod_groups(api, source):
            state.gangs.pod_group_changed(source, raw)
    filter_ = Filter(state, settings, budgets=EffortBudgets(sleep=lambda _: None))
    state.forecast.refresh()
    filter_.refresh()
    outlooks = GangOutlooks(state, filter_, settings)
    views = outlooks.incomplete(state.gpu_pods())
    examined = [outlooks.with_outlook(view, nodes) for view in views[:_MOST_OUTLOOKS]]
    return (*examined, *views[_MOST_OUTLOOKS:])


def _key(raw: cluster_objects.Raw) -> str:
    return f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"


def explain(api: Api, settings: Settings, kind: str, raw: Raw, selected: Sequence[str]) -> Explanation:
    """Explain a Pod, an MtgpuPod or a ResourceClaim from the objects of the API server.

    Args:
        selected: The names of the nodes that the user selects, if any.

    Raises:
        ClickException: if a selected node does not exist, or if the pod was deleted meanwhile.
        ApiError, Unreachable: if the API server does not list the objects.
    """
    state, names = _read_cluster(api, settings, _nodes_to_read(kind, raw, settings, selected))
    if kind == "Pod":
        _read_pod_group(api, state, raw)
    try:
        claims = ClaimDecider(state, api, settings, EffortBudgets(sleep=lambda _: None))
        return Explainer(state, settings, claims=claims).object(kind, raw, names, selected)
    except NoSuchNode as error:
        raise click.ClickException(str(error)) from error
    except NotCached as error:
        text = f"pod {error} was deleted while the cluster was read; run the command again"
        raise click.ClickException(text) from error


def _nodes_to_read(kind: str, raw: Raw, settings: Settings, selected: Sequence[str]) -> Sequence[str]:
    """Return the nodes to read: the node of the object, or else those that the user selects. () means all nodes.

    All nodes are read for a pod that belongs to groups or to a gang, because their pods may be on other nodes, and for
    a node policy that learns from all pods. All nodes are also read for an MtgpuPod without a node, and if a name needs
    escaping.
    """
    own = raw["spec"].get("nodeName")
    nodes = [str(own)] if own else list(dict.fromkeys(selected))
    if not all(map(_SIMPLE.fullmatch, nodes)) or not (own or kind == "Pod"):
        return ()
    gpu_pod = None if own else read_gpu_pod(raw, settings)
    if gpu_pod is None:
        return nodes
    if gpu_pod.constraints.groups or gang_name(gpu_pod.pod) or settings.node_policy in LEARNING_POLICIES:
        return ()
    return nodes


def _read_cluster(api: Api, settings: Settings, nodes: Sequence[str]) -> tuple[ClusterCache, list[str]]:
    """Return a cache that is filled as the scheduler fills its own, and the sorted names of the nodes.

    Args:
        nodes: The names of the nodes to read. Besides them, the pods on them and the pods without a node are read. If
            there are no names, all nodes and pods are read.
    """
    named = [f"metadata.name={name}" for name in nodes] or [""]
    on_them = [f"spec.nodeName={name}" for name in (*nodes, "")] if nodes else [""]
    lists = ClusterLists(
        chain.from_iterable(cluster_objects.nodes(api, fields) for fields in named),
        chain.from_iterable(cluster_objects.devices(api, fields) for fields in named),
        cluster_objects.unhealthy_lists(api),
        cluster_objects.mtgpupods(api),
        chain.from_iterable(cluster_objects.whole_pods(api, fields) for fields in on_them),
        # No field selector selects the claims on a node.
        cluster_objects.claims(api),
        cluster_objects.device_classes(api),
    )
    state = ClusterCache(settings)
    return state, fill_cache(state, lists)


def _read_pod_group(api: Api, state: ClusterCache, raw: Raw) -> None:
    """Read the PodGroup of a waiting pod, if it names one."""
    pod = read_pod(raw)
    name = None if pod.node else gang_name(pod)
    if name is not None and name.source in POD_GROUP_APIS:
        group = cluster_objects.pod_group(api, name)
        if group is not None:
            state.gangs.pod_group_changed(name.source, group)
