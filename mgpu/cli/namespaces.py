"""The options `-n` and `-A` of the commands that show a whole cluster, and what they leave of it.

Cards belong to no namespace, so by default these commands show the pods of all namespaces, as `kubectl describe node`
does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import click

from mgpu.cli import completion
from mgpu.presentation.answers import ClusterAnswer
from mgpu.presentation.card_views import NodeView
from mgpu.presentation.claim_views import split_name
from mgpu.presentation.overview import Overview

V = TypeVar("V")


def namespace_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add -n and -A. The command gets the arguments `namespace` ("" for all) and `all_namespaces`."""
    everywhere = click.option(
        "-A", "--all-namespaces", is_flag=True, help="Show the pods of all namespaces.  [default; overrides -n]"
    )
    return click.option(
        "-n",
        "--namespace",
        default="",
        shell_complete=completion.namespaces,
        help="Show only the pods of this namespace.  [default: all]",
    )(everywhere(command))


def is_in(holder: str, namespace: str) -> bool:
    """Return whether a pod or claim, named as in a `CardUse`, is in the namespace."""
    return split_name(holder)[0] == namespace


def only_namespace(answer: ClusterAnswer, namespace: str) -> ClusterAnswer:
    """Return the answer without what other namespaces hold, wait for and request; unchanged if `namespace` is "".

    Of the nodes, those remain where the namespace holds a device, with all that is held of their devices: otherwise it
    would seem free.
    """
    if not namespace:
        return answer
    found = answer.overview
    nodes = tuple(node for node in found.nodes if _holds(node, namespace))
    names = {node.name for node in nodes}
    overview = replace(
        without_other_waiting(found, namespace),
        nodes=nodes,
        unclear={what: why for what, why in found.unclear.items() if _concerns(what, namespace, names)},
        constraints=_only(found.constraints, namespace),
        groups=tuple(view for view in found.groups if view.group.namespace == namespace),
        mtgpupods=tuple(view for view in found.mtgpupods if view.pod.namespace == namespace),
        agents_not_ready={node: pod for node, pod in found.agents_not_ready.items() if node in names},
    )
    return replace(answer, overview=overview, gangs=tuple(v for v in answer.gangs if v.name.namespace == namespace))


def without_other_waiting(found: Overview, namespace: str) -> Overview:
    """Return the overview with the waiting pods of one namespace; unchanged if `namespace` is ""."""
    if not namespace:
        return found
    pending = tuple(name for name in found.pending if is_in(name, namespace))
    return replace(found, pending=pending, gated=_only(found.gated, namespace))


def _holds(node: NodeView, namespace: str) -> bool:
    return any(is_in(use.pod, namespace) for view in node.devices for use in view.uses)


def _only(found: Mapping[str, V], namespace: str) -> dict[str, V]:
    return {name: value for name, value in found.items() if is_in(name, namespace)}


def _concerns(what: str, namespace: str, nodes: Iterable[str]) -> bool:
    """Return whether an object such as `Pod team/a` or `Device n1` is in the namespace or on one of the nodes."""
    kind, _, name = what.partition(" ")
    owner, slash, _ = name.partition("/")
    return owner == namespace if slash else bool(kind) and name in nodes
