"""Completes the names of nodes, namespaces, pods, claims and contexts on the command line.

The functions are for `shell_complete` of click. A shell waits for them at each press of the tab key, so they ask the
API server only for names and only for a moment. They return nothing if it does not answer, or if the user may not list
the objects: an error would destroy the line that the user writes.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import click
from click.shell_completion import CompletionItem

from mgpu.kube.decoding import decode

_SECONDS = 1.5
"""How long the API server may take to begin its answer."""
_MOST = 500
"""The most names that are listed. A shell cannot show more in a useful way."""
_NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.:@/]*", re.ASCII)
"""What bash takes literally, and a command for no option. bash inserts a word into the line as it is, so the name
`$(command)`, which a hostile API server may send, would be a command there."""
_ONLY_NAMES = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_KINDS: Mapping[str, tuple[str, str]] = {
    "pod/": ("/api/v1", "pods"),
    "mtgpupod/": ("/apis/lsalab.nthu/v1", "mtgpupods"),
    "claim/": ("/apis/resource.k8s.io/v1", "resourceclaims"),
}
"""For each type of `mgpu explain`: the path of the API group, and the plural name."""


def nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a node, without those that the line names already."""
    named = ctx.params.get(param.name or "") or ()
    return _items((name for name in _names(ctx, "/api/v1/nodes") if name not in named), incomplete)


def namespaces(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    return _items(_names(ctx, "/api/v1/namespaces"), incomplete)


def contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    from mgpu.kube.client import find_kubeconfig

    files = find_kubeconfig(ctx.params.get("kubeconfig") or "")
    if not files:
        return []
    from mgpu.kube.kubeconfig import context_names

    return _items(context_names(files), incomplete)


def explained(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an argument of `mgpu explain`: the name of a pod, `TYPE/`, `TYPE/NAME`, or the NAME after a TYPE."""
    before = ctx.params.get(param.name or "") or ()
    if before:
        kind = f"{before[0]}/"
        return _items(_of_namespace(ctx, *_KINDS[kind]), incomplete) if len(before) == 1 and kind in _KINDS else []
    kind, slash, _ = incomplete.partition("/")
    if slash:
        names = _of_namespace(ctx, *_KINDS[f"{kind}/"]) if f"{kind}/" in _KINDS else ()
        return _items((f"{kind}/{name}" for name in names), incomplete)
    return [*_items(_of_namespace(ctx, *_KINDS["pod/"]), incomplete), *_items(_KINDS, incomplete)]


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and _NAME.fullmatch(name)]


def _of_namespace(ctx: click.Context, prefix: str, plural: str) -> list[str]:
    from mgpu.cli.connection import current_namespace

    options = ctx.params
    found = options.get("namespace") or current_namespace(
        str(options.get("kubeconfig") or ""), str(options.get("context") or "")
    )
    return _names(ctx, f"{prefix}/namespaces/{quote(found, safe='')}/{plural}")


def _names(ctx: click.Context, path: str) -> list[str]:
    """Return the names of the objects of a collection; none if they cannot be listed at once."""
    try:
        return _list_names(ctx.params, path)
    except Exception:  # noqa: BLE001 (whatever went wrong, the user only wants to complete a word)
        return []


def _list_names(options: Mapping[str, Any], path: str) -> list[str]:
    from mgpu.cli.connection import Connection
    from mgpu.kube import Api

    connection = Connection(
        str(options.get("kubeconfig") or ""),
        str(options.get("context") or ""),
        str(options.get("user") or ""),
        tuple(options.get("groups") or ()),
        timeout=_SECONDS,
    )
    body, _ = connection.connect(_SECONDS, Api).fetch(path, {"Accept": _ONLY_NAMES}, seconds=_SECONDS, limit=_MOST)
    answer = decode(body)
    assert isinstance(answer, dict)
    return [str(item["metadata"]["name"]) for item in answer["items"]]
