"""Lists the API objects that describe cards and holdings, page by page.

All commands that read a cluster call these functions, so that they handle missing kinds and missing rights in the same
way.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mgpu.dialects import gpushare, mtgpu
from mgpu.kube import Api, ApiError
from mgpu.model.device_object import DEVICE_API
from mgpu.presentation.plain_text import one_line

Raw = dict[str, Any]


def nodes(api: Api, fields: str = "") -> Iterator[Raw]:
    """List Nodes. fields: a field selector. Raises ApiError and Unreachable, as all functions of this module do."""
    return _list(api, "/api/v1/nodes", fields=fields)


def devices(api: Api, fields: str = "") -> Iterator[Raw]:
    """List Devices; none without their CRD, as in a cluster of gpushare nodes, which report cards in node status."""
    return _list(api, f"/apis/{DEVICE_API}/devices", fields=fields, empty_status=404)


def pods(api: Api) -> Iterator[Raw]:
    """List Pods without their largest unused fields, for callers that store all Pods."""
    for raw in _list(api, "/api/v1/pods"):
        raw["metadata"].pop("managedFields", None)
        (raw.get("spec") or {}).pop("volumes", None)
        yield raw


def whole_pods(api: Api, fields: str = "") -> Iterator[Raw]:
    """List Pods with all fields. fields: a field selector."""
    return _list(api, "/api/v1/pods", fields=fields)


def mtgpupods(api: Api) -> Iterator[Raw]:
    """List MtgpuPods, or none and a warning if the user may not. Their Pods and occupy pods still show the holdings."""
    try:
        yield from _list(api, mtgpu.COLLECTION, empty_status=404)
    except ApiError as error:
        if error.status != 403:
            raise
        click.echo(f"MtgpuPods are omitted; the holdings of their Pods are shown: {one_line(error.message)}", err=True)


def unhealthy_lists(api: Api) -> Iterator[Raw]:
    """List the ConfigMaps in which gpushare reports unhealthy cards; none if the user may not read their namespace."""
    namespace = gpushare.UNHEALTHY_CARD_LISTS.namespace
    return _list(api, f"/api/v1/namespaces/{namespace}/configmaps", empty_status=403)


def _list(api: Api, path: str, *, fields: str = "", empty_status: int = 0) -> Iterator[Raw]:
    """List objects page by page; none if the API server answers with `empty_status`."""
    try:
        for page, _ in api.pages(path, fieldSelector=fields):
            yield from page
    except ApiError as error:
        if error.status != empty_status:
            raise


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while a whole cluster is read: each collection would visit all objects again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
