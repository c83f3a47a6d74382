"""The objects of a cluster that say who holds what, one after the other as they come."""

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
    """fields: a field selector. Raises ApiError and Unreachable, as all of these."""
    return _listed(api, "/api/v1/nodes", fields=fields)


def devices(api: Api, fields: str = "") -> Iterator[Raw]:
    """None where there are no Devices: nodes may still say what cards they have."""
    return _listed(api, f"/apis/{DEVICE_API}/devices", fields=fields, without=404)


def pods(api: Api) -> Iterator[Raw]:
    """Without what is much and nobody reads, for those who keep all of them."""
    for raw in _listed(api, "/api/v1/pods"):
        raw["metadata"].pop("managedFields", None)
        (raw.get("spec") or {}).pop("volumes", None)
        yield raw


def whole_pods(api: Api, fields: str = "") -> Iterator[Raw]:
    """For those who keep none of them. fields: a field selector."""
    return _listed(api, "/api/v1/pods", fields=fields)


def mtgpupods(api: Api) -> Iterator[Raw]:
    """Not everybody may look at them; what their Pods and occupy pods hold is known all the same."""
    try:
        yield from _listed(api, mtgpu.COLLECTION, without=404)
    except ApiError as error:
        if error.status != 403:
            raise
        click.echo(f"MtgpuPods are not shown, only what their Pods hold: {one_line(error.message)}", err=True)


def unhealthy_lists(api: Api) -> Iterator[Raw]:
    """The ConfigMaps in which gpushare lists unhealthy cards; not everybody may look into their namespace."""
    return _listed(api, f"/api/v1/namespaces/{gpushare.UNHEALTHY_NAMESPACE}/configmaps", without=403)


def _listed(api: Api, path: str, *, fields: str = "", without: int = 0) -> Iterator[Raw]:
    """The objects, page by page; none where the API server answers with the status `without`."""
    try:
        for page, _ in api.pages(path, fieldSelector=fields):
            yield from page
    except ApiError as error:
        if error.status != without:
            raise


@contextmanager
def uncollected() -> Iterator[None]:
    """While much is read that is needed to the end: the collector would walk all of it, again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
