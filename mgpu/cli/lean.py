"""Lists of Pods without what these commands never look at (managed fields, volumes, probes): to decode that, and to
throw it away, took most of the time in which a large cluster was read.
"""

from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict


class _Meta(TypedDict, total=False):
    """Whatever metadata has, but managedFields."""

    annotations: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    generateName: Any
    labels: Any
    name: Any
    namespace: Any
    ownerReferences: Any
    resourceVersion: Any
    uid: Any


class _Container(TypedDict, total=False):
    name: Any
    env: Any
    resources: Any
    restartPolicy: Any


class _Spec(TypedDict, total=False):
    containers: list[_Container]
    initContainers: list[_Container]
    nodeName: Any
    overhead: Any
    priority: Any
    resources: Any
    schedulerName: Any


class _Status(TypedDict, total=False):
    containerStatuses: Any
    initContainerStatuses: Any
    nominatedNodeName: Any
    phase: Any
    startTime: Any


class _Pod(TypedDict, total=False):
    metadata: _Meta
    spec: _Spec
    status: _Status


class _Page(TypedDict, total=False):
    metadata: Any
    items: list[_Pod]


_PAGE = TypeAdapter(_Page)


def decode_pods(body: bytes) -> Any:
    """A page of Pods, each with what `read_pod` and those it is handed to beside the Pod look at.

    One with an odd object comes whole: what is wrong with that is for its reader to say. Raises orjson.JSONDecodeError.
    """
    try:
        return _PAGE.validate_json(body)
    except ValidationError:
        return orjson.loads(body)
