"""Lists the API objects that describe cards and holdings, page by page.

Commands that read a cluster use these functions, so that all of them treat missing kinds and missing rights alike.
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
    """List Nodes. fields: a field selector. Raises ApiError and Unreachable, as all functions here."""
    return _listed(api, "/api/v1/nodes", fields=fields)


def devices(api: Api, fields: str = "") -> Iterator[Raw]:
    """List Devices. A cluster without their CRD has none; gpushare nodes report their cards in node status."""
    return _listed(api, f"/apis/{DEVICE_API}/devices", fields=fields, without=404)


def pods(api: Api) -> Iterator[Raw]:
    """List Pods without their largest unused fields, for callers that keep all of them."""
    for raw in _listed(api, "/api/v1/pods"):
        raw["metadata"].pop("managedFields", None)
        (raw.get("spec") or {}).pop("volumes", None)
        yield raw


def whole_pods(api: Api, fields: str = "") -> Iterator[Raw]:
    """List Pods as they are. fields: a field selector."""
    return _listed(api, "/api/v1/pods", fields=fields)


def mtgpupods(api: Api) -> Iterator[Raw]:
    """List MtgpuPods, or none with a warning if the user may not: their Pods and occupy pods say what they hold."""
    try:
        yield from _listed(api, mtgpu.COLLECTION, without=404)
    except ApiError as error:
        if error.status != 403:
            raise
        click.echo(f"MtgpuPods are not shown, only what their Pods hold: {one_line(error.message)}", err=True)


def unhealthy_lists(api: Api) -> Iterator[Raw]:
    """List the ConfigMaps in which gpushare reports unhealthy cards; none if the user may not read their namespace."""
    namespace = gpushare.UNHEALTHY_CARD_LISTS.namespace
    return _listed(api, f"/api/v1/namespaces/{namespace}/configmaps", without=403)


def _listed(api: Api, path: str, *, fields: str = "", without: int = 0) -> Iterator[Raw]:
    """List objects page by page; none if the API server answers with the status `without`."""
    try:
        for page, _ in api.pages(path, fieldSelector=fields):
            yield from page
    except ApiError as error:
        if error.status != without:
            raise


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while a whole cluster is read: each collection would walk all objects again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
