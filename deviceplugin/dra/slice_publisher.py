"""Publishes the cards of the node in its ResourceSlices, and keeps the slices up to date.

kube-scheduler allocates claims from the slice. The capacity of a card is what pods without claims leave free;
kube-scheduler itself subtracts what claims hold. Every write makes kube-scheduler evaluate waiting pods again, so
changes are collected, and a slice is written only if its content differs. The kubelet deletes the slices of its node
whenever it starts, and 30 s after it has lost the driver, so the slices are watched.

Most nodes have one slice. Where claims get MIG instances, there are several (`pool_content`). They are written one
after the other, and slices that do not belong to the pool are deleted first.

`slice_content` compares slices. Other clients may change annotations (`resource_slices.WAKE`), which stay.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from deviceplugin.dra.pool_content import PoolOffer, desired_pool
from deviceplugin.dra.slice_content import difference, is_ours, lost_fields
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from mgpu.kube.server_version import OLDEST_FOR_CLAIMS, PATH, minor_version
from mgpu.model.errors import RetryLater
from mgpu.model.mig_resource_slices import PublishedMigCard
from mgpu.model.resource_claims import API, DRIVER, SLICES
from mgpu.model.resource_slices import PublishedCard

log = logging.getLogger(__name__)

Raw = dict[str, Any]
COLLECT_SECONDS = 0.2
"""How long further changes are awaited after the first one."""
LEAST_INTERVAL = 0.5
"""The least time between two writes."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_CONFLICT = 409
_MISSING = 404


class UnsupportedServer(Exception):
    """The API server does not have what claims for shares need. The message is for administrators."""


class _Outcome(NamedTuple):
    """The result of one attempt.

    Attributes:
        problem: Why the slice is not up to date; None if it is.
        is_local: Whether the agent itself does not know something yet, so that the API server was not called.
        needs_administrator: Whether somebody has to do something about the problem.
    """

    problem: str | None
    is_local: bool = False
    needs_administrator: bool = False


class SlicePublisher:
    """A thread that writes the ResourceSlices, from `start` to `stop`. Call `update` whenever cards may have changed.

    The slices stay when the thread ends, since the next agent continues with them.

    Args:
        cards: A function that returns the cards to publish. It raises RetryLater while something is not known yet.
        mig_cards: A function that returns the cards of which claims get MIG instances, and also raises RetryLater.
        node_uid: A function that returns the UID of the Node, or None if it has not been read yet.
        warn: A function that reports a new problem.

    Attributes:
        problem: The reason why the API server does not have the present slices; None if it has.
        published: Whether the API server has had the complete slices at least once.
        writes: The number of writes.
    """

    def __init__(
        self,
        api: Api,
        node: str,
        cards: Callable[[], tuple[PublishedCard, ...]],
        node_uid: Callable[[], str | None],
        warn: Callable[[str], None],
        *,
        mig_cards: Callable[[], tuple[PublishedMigCard, ...]] = lambda: (),
        collect_seconds: float = COLLECT_SECONDS,
        least_interval: float = LEAST_INTERVAL,
    ) -> None:
        self._api = api
        self._node = node
        self._cards = cards
        self._mig_cards = mig_cards
        self._node_uid = node_uid
        self._warn = warn
        self._collect_seconds = collect_seconds
        self._least_interval = least_interval
        self._lock = threading.Lock()
        self._slices: dict[str, Raw] = {}
        self._supported: frozenset[str] = frozenset()  # The names of the slices that the API server can store.
        self._wake = threading.Event()
        self._stop = threading.Event()
        query = {"fieldSelector": f"spec.nodeName={node}"}
        self._watch = Reflector(api, SLICES, self._take, self._drop, query, optional=True)
        self._thread = threading.Thread(target=self._run, name="resource slice", daemon=True)
        self.problem: str | None = "the ResourceSlice has not been written yet"
        self.published = False
        self.writes = 0

    def start(self) -> None:
        self._watch.start()
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Wait at most two seconds for a write in progress."""
        self._stop.set()
        self._wake.set()
        self._watch.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def update(self) -> None:
        """Let the thread compare the cards with the slice. Thread-safe."""
        self._wake.set()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        warned: str | None = None
        while not self._stop.is_set():
            self._wake.wait(pause if self.problem else None)
            # Changes that come now are read below. Those that come after `clear` cause another round.
            self._stop.wait(self._collect_seconds)
            self._wake.clear()
            if self._stop.is_set():
                return
            began = time.monotonic()
            found = self._try()
            if found.needs_administrator and found.problem and found.problem != warned:
                warned = found.problem
                self._warn(found.problem)
            elif found.problem and found.problem != self.problem:
                log.info("the ResourceSlice is not up to date: %s", found.problem)
            self.problem = found.problem
            pause = min(pause * 2, _LONGEST_PAUSE) if found.problem and not found.is_local else _FIRST_PAUSE
            # After a failure the thread pauses even if the cards keep changing, to spare the API server.
            rest = max(0.0, self._least_interval - (time.monotonic() - began))
            self._stop.wait(pause if found.problem else rest)

    def _try(self) -> "_Outcome":
        try:
            self._publish()
        except RetryLater as error:
            return _Outcome(str(error), is_local=True)
        except UnsupportedServer as error:
            self._supported = frozenset()
            return _Outcome(str(error), needs_administrator=True)
        except Unreachable as error:
            return _Outcome(f"API server: {error}")
        except ApiError as error:
            if error.status == _MISSING:
                return _Outcome(_missing_api(), needs_administrator=True)
            problem = f"the ResourceSlice cannot be written: {error}"
            return _Outcome(problem, needs_administrator=error.status != _CONFLICT)
        except Exception as error:
            # An unexpected object in the API must not end this loop, which is the outermost loop of the thread.
            log.exception("the ResourceSlice cannot be published")
            return _Outcome(f"unexpected error of the agent: {error!r}", needs_administrator=True)
        self.published = True
        return _Outcome(None)

    def _publish(self) -> None:
        if not self._watch.synced:
            raise RetryLater("the ResourceSlices of the node have not been listed yet")
        uid = self._node_uid()
        if uid is None:
            raise RetryLater("the Node has not been read yet")
        offer = PoolOffer(self._cards(), self._mig_cards())
        present = self._present()
        desired = {one["metadata"]["name"]: one for one in desired_pool(self._node, uid, offer, present)}
        for name in sorted(present.keys() - desired.keys()):
            self._delete(name)
        for name, one in desired.items():
            if name not in self._supported:
                self._check_support(present.get(name), one)
        self._supported = self._supported.union(desired)
        for name, one in desired.items():
            before = present.get(name)
            if before is None or difference(before, one) is not None:
                self._write(before, one)

    def _check_support(self, present: Raw | None, desired: Raw) -> None:
        """Raise UnsupportedServer if the API server is too old, or would drop fields whose feature gates are disabled.

        Without these fields, kube-scheduler would allocate cards of which pods hold shares as if they were idle.
        """
        version = self._version()
        if version is not None and version < OLDEST_FOR_CLAIMS:
            raise UnsupportedServer(
                f"the API server has version {version[0]}.{version[1]}; claims need Kubernetes 1.35 or newer, because "
                "kube-scheduler 1.34 uses only one card of a node for them"
            )
        lost = lost_fields(self._send(present, desired, dry_run=True), desired)
        if lost:
            raise UnsupportedServer(
                f"the API server drops {', '.join(lost)} of ResourceSlices; claims for shares need Kubernetes 1.36, or "
                "1.35 with the feature gates DRAConsumableCapacity and DRADeviceTaints, and claims for MIG instances "
                "also DRAPartitionableDevices"
            )

    def _version(self) -> tuple[int, int] | None:
        """Return the version of the API server, or None if the agent may not read it."""
        try:
            return minor_version(self._api.get(PATH))
        except ApiError:
            return None

    def _write(self, present: Raw | None, desired: Raw) -> None:
        answer = self._send(present, desired, dry_run=False)
        self.writes += 1
        self._take(answer)
        if reason := difference(answer, desired):
            # The next round would find the same difference, so it must not follow at once.
            raise UnsupportedServer(f"the API server stores another ResourceSlice than was written: {reason}")
        extra = {"slice": desired["metadata"]["name"], "devices": len(desired["spec"].get("devices", ()))}
        log.info("ResourceSlice written", extra=extra)

    def _send(self, present: Raw | None, desired: Raw, *, dry_run: bool) -> Raw:
        query = {"dryRun": "All"} if dry_run else {}
        if present is None:
            return self._api.create(SLICES, desired, **query)
        try:
            return self._api.replace(f"{SLICES}/{quote(desired['metadata']['name'])}", desired, **query)
        except ApiError as error:
            if error.status in (_CONFLICT, _MISSING):
                raise RetryLater(f"the ResourceSlice has changed: {error}") from error
            raise

    def _present(self) -> dict[str, Raw]:
        """Return the slices of the driver on this node, by name. Those that the pool does not need would spoil it."""
        with self._lock:
            return dict(self._slices)

    def _delete(self, name: str) -> None:
        try:
            self._api.delete(f"{SLICES}/{quote(name)}")
        except ApiError as error:
            if error.status != _MISSING:
                raise
        with self._lock:
            self._slices.pop(name, None)

    def _take(self, raw: Raw) -> None:
        """Store a slice of the watch, or the answer to a write, unless it is older than the stored one."""
        if not is_ours(raw, self._node):
            return
        name = raw["metadata"]["name"]
        with self._lock:
            if not _is_older(raw, self._slices.get(name)):
                self._slices[name] = raw
        self._wake.set()

    def _drop(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        with self._lock:
            if not _is_older(raw, self._slices.get(name)):
                self._slices.pop(name, None)
        self._wake.set()


class SliceRemoval:
    """A thread that deletes the slices of a node whose agent does not serve claims any more, until it has succeeded."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resource slice", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait at most two seconds for a call in progress."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._stop.is_set() and not self._remove():
            self._stop.wait(_LONGEST_PAUSE)

    def _remove(self) -> bool:
        try:
            found, _ = self._api.list(SLICES, fieldSelector=f"spec.nodeName={self._node}")
            for name in sorted(raw["metadata"]["name"] for raw in found if is_ours(raw, self._node)):
                self._api.delete(f"{SLICES}/{quote(name)}")
                log.info("ResourceSlice deleted, since dra.enabled is false", extra={"slice": name})
        except (ApiError, Unreachable) as error:
            if not (isinstance(error, ApiError) and error.status == _MISSING):
                log.warning("the ResourceSlice of a node without DRA is not deleted: %s", error)
                return False
        return True


def _missing_api() -> str:
    return f"the API server does not serve {API}, which dra.enabled needs (Kubernetes 1.35 or later; driver {DRIVER})"


def _is_older(raw: Mapping[str, Any], stored: Mapping[str, Any] | None) -> bool:
    """Return whether an object of the watch precedes the stored answer to a write.

    Resource versions are decimal integers (KEP-5504). Others are not compared.
    """
    if stored is None or raw["metadata"].get("uid") != stored["metadata"].get("uid"):
        return False
    versions = [str(one["metadata"].get("resourceVersion", "")) for one in (raw, stored)]
    return all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])
