"""Reads the size of a gang whose PodGroup no watch has delivered yet.

PodGroups and pods come by different watches, so kube-scheduler may filter the first member of a gang before this
process knows its PodGroup. Without the size, the members would be placed one by one, and a part of them bound.
`decisions.gang_filter` calls `PodGroupReader` for unknown groups only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import quote

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.model.gangs import POD_GROUP_PATHS, GangName, read_pod_group

_NEW_SECONDS = 10.0
"""For how long after its first absence a group is read at every call, because kube-scheduler may see it first."""
_PAUSE_SECONDS = 10.0
"""The time between reads of a group that still does not exist, or that cannot be read. The watch delivers it too."""
_FORGET_SECONDS = 60.0
"""After how long without a call a group counts as new again."""
_MAX_ABSENT = 1000
"""The most absent groups that are remembered. The others are read at every call."""


class PodGroupReader:
    """Reads PodGroups from the API server. Two threads may read the same group, which is harmless."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._absent: OrderedDict[GangName, tuple[float, float]] = (
            OrderedDict()
        )  # When first absent; when to read next.

    def min_count(self, name: GangName) -> int | None:
        """Return how many members the gang needs, 0 if the group is no gang, or None if there is no such group.

        Raises RetryLater if the API server does not answer.
        """
        now = self._clock()
        since, due = self._absent.get(name, (now, now))
        if now < due:
            return None
        if now - due >= _FORGET_SECONDS:
            since = now  # Nobody has asked for long, so this may be a new group of the same name.
        collection, _, kind = POD_GROUP_PATHS[name.source].rpartition("/")
        path = f"{collection}/namespaces/{quote(name.namespace, safe='')}/{kind}"
        try:
            # A list, because the role of mgpu's scheduler allows lists and watches of PodGroups only.
            found, _ = self._api.list(path, fieldSelector=f"metadata.name={name.name}")
        except ApiError as error:
            if error.status >= 500 or error.status == 429:
                raise RetryLater(str(error)) from error
            found, since = [], now - _NEW_SECONDS  # The kind is not served, or may not be read.
        except Unreachable as error:
            raise RetryLater(str(error)) from error
        if found:
            self._absent.pop(name, None)
            return read_pod_group(name.source, found[0])[1]
        self._absent[name] = (since, now + _PAUSE_SECONDS if now - since >= _NEW_SECONDS else now)
        while len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)
        return None
