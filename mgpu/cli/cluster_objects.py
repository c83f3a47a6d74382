"""Lists the API objects that describe cards and holdings, page by page.

All commands that read a cluster use this module. The argument `fields` is a field selector; "" selects all objects.
Each function that lists objects raises ApiError or Unreachable if the list fails, except in the cases that its
docstring names.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from mgpu.dialects import gpushare, mtgpu
from mgpu.kube import Api, ApiError
from mgpu.model.device_object import DEVICE_API
from mgpu.model.gangs import POD_GROUP_APIS, POD_GROUP_PATHS, GangName
from mgpu.model.resource_claims import CLAIMS, CLASSES
from mgpu.presentation.plain_text import one_line

Raw = dict[str, Any]


class ClusterLists(NamedTuple):
    """The objects that describe the cards of a cluster and the pods that hold them."""

    nodes: Iterable[Raw]
    devices: Iterable[Raw]
    configmaps: Iterable[Raw]
    mtgpupods: Iterable[Raw]
    pods: Iterable[Raw]
    claims: Iterable[Raw] = ()
    classes: Iterable[Raw] = ()


def read_lists(api: Api) -> ClusterLists:
    """Return all objects, with Pods as `pods` yields them."""
    return ClusterLists(
        devices=tuple(devices(api)),
        configmaps=tuple(unhealthy_lists(api)),
        nodes=tuple(nodes(api)),
        pods=tuple(pods(api)),
        mtgpupods=tuple(mtgpupods(api)),
        claims=tuple(claims(api)),
        classes=tuple(device_classes(api)),
    )


def nodes(api: Api, fields: str = "") -> Iterator[Raw]:
    return _list(api, "/api/v1/nodes", fields=fields)


def devices(api: Api, fields: str = "") -> Iterator[Raw]:
    """Yield the Devices; none if the CRD is missing.

    A cluster with gpushare's own device plugin may lack the CRD, because that plugin reports cards in the node status.
    """
    return _list(api, f"/apis/{DEVICE_API}/devices", fields=fields, empty_status=404)


def pods(api: Api) -> Iterator[Raw]:
    """Yield the Pods without their largest unused fields, for callers that store all Pods."""
    for raw in _list(api, "/api/v1/pods"):
        raw["metadata"].pop("managedFields", None)
        (raw.get("spec") or {}).pop("volumes", None)
        yield raw


def whole_pods(api: Api, fields: str = "") -> Iterator[Raw]:
    """Yield the Pods with all fields."""
    return _list(api, "/api/v1/pods", fields=fields)


def mtgpupods(api: Api) -> Iterator[Raw]:
    """Yield the MtgpuPods; none if the CRD is missing.

    If the user may not list MtgpuPods, the function prints a warning and yields none. The Pods of MtgpuPods and the
    occupy pods still show which cards are held.
    """
    try:
        yield from _list(api, mtgpu.COLLECTION, empty_status=404)
    except ApiError as error:
        if error.status != 403:
            raise
        click.echo(f"MtgpuPods are omitted; the holdings of their Pods are shown: {one_line(error.message)}", err=True)


def claims(api: Api) -> Iterator[Raw]:
    """Yield the ResourceClaims; none if the API server does not serve them.

    If the user may not list them, the function prints a warning and yields none.
    """
    try:
        for raw in _list(api, CLAIMS, empty_status=404):
            raw["metadata"].pop("managedFields", None)
            yield raw
    except ApiError as error:
        if error.status != 403:
            raise
        click.echo(f"ResourceClaims are omitted, and what they hold of the cards: {one_line(error.message)}", err=True)


def device_classes(api: Api) -> Iterator[Raw]:
    """Yield the DeviceClasses; none if the API server does not serve them or the user may not list them."""
    try:
        yield from _list(api, CLASSES, empty_status=404)
    except ApiError as error:
        if error.status != 403:
            raise


def unhealthy_lists(api: Api) -> Iterator[Raw]:
    """Yield the ConfigMaps in which gpushare lists unhealthy cards; none if the user may not read their namespace."""
    namespace = gpushare.UNHEALTHY_CARD_LISTS.namespace
    return _list(api, f"/api/v1/namespaces/{namespace}/configmaps", empty_status=403)


def pod_groups(api: Api, source: str) -> Iterator[Raw]:
    """Yield the PodGroups of an API group (`mgpu.model.gangs`); none if their CRD is missing.

    If the user may not list them, the function prints a warning and yields none.
    """
    try:
        yield from _list(api, POD_GROUP_PATHS[source], empty_status=404)
    except ApiError as error:
        _report_forbidden_pod_groups(error)


def pod_group(api: Api, name: GangName) -> Raw | None:
    """Return the PodGroup of a gang, or None if there is none or the user may not get it, of which it warns."""
    path = f"{POD_GROUP_APIS[name.source]}/namespaces/{quote(name.namespace, safe='')}/podgroups"
    try:
        return api.get(f"{path}/{quote(name.name, safe='')}")
    except ApiError as error:
        if error.status != 404:
            _report_forbidden_pod_groups(error)
        return None


def _report_forbidden_pod_groups(error: ApiError) -> None:
    if error.status != 403:
        raise error
    click.echo(f"PodGroups are omitted; the sizes of their gangs are unknown: {one_line(error.message)}", err=True)


def _list(api: Api, path: str, *, fields: str = "", empty_status: int = 0) -> Iterator[Raw]:
    """Yield the objects of a collection, page by page.

    Args:
        empty_status: the HTTP status of an error for which the function yields nothing.
    """
    try:
        for page, _ in api.pages(path, fieldSelector=fields):
            yield from page
    except ApiError as error:
        if error.status != empty_status:
            raise


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while a whole cluster is read, since each run would visit all objects again.

    Afterwards the garbage collector does not visit the objects that exist at that time (`gc.freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
