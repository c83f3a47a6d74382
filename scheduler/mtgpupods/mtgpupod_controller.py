"""The controller of MtgpuPods: gives them their cards and makes their Pods, on a thread of its own.

Level-triggered, node by node: what is to be done follows from what the API has (scheduler/mtgpupods/node_plan.py), so a
crash between any two steps loses nothing. Every write is refused by the API server where it was decided on what is out
of date by then; the watch brings what is newer, and with it the next look.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.dialects.mtgpu_pods import manifest
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.mtgpupods.backoff import SLOW, Paces, Waits
from scheduler.mtgpupods.mtgpupod_cache import Known, Raw, is_own, key_of
from scheduler.mtgpupods.mtgpupod_status import Transition, next_status, refused, transitions
from scheduler.mtgpupods.mtgpupod_writer import Writer, has_finalizer
from scheduler.mtgpupods.node_plan import Plan, plan
from scheduler.mtgpupods.observation import Look, look, read
from scheduler.mtgpupods.occupy_writer import Occupying
from scheduler.mtgpupods.outcome import FALSE, Said, Verdict
from scheduler.mtgpupods.service_order import FINALIZERS, SECONDS, WRITES, in_turn
from scheduler.mtgpupods.stored_objects import of_mtgpupod, read_text, text_of
from scheduler.work_queue import MAX_PAUSE, Queue

log = logging.getLogger(__name__)

Tell = Callable[[dict[str, Any], Transition], None]
"""(object reference, what is another condition now): an Event; must return at once."""
_BY_ADMISSION = ("admission webhook", "is forbidden: ")
"""In the message of who denies a Pod without calling it invalid: webhooks (400 unless they say otherwise) and policies
(ValidatingAdmissionPolicy, 422), which may change their minds.
"""
_NEXT_SECONDS = 0.05
"""Until the next attempt on a node for which one was not enough: the watch brings what this one wrote."""
_TRIES = 50
"""Each is lost to a decision on this node that succeeded."""


class _Stale(Exception):
    """What was seen is out of date, as the API server says: the watch is about to bring what is newer."""


class Controller:
    """`…_changed` and `…_gone` are fed by the watches, and feed the ClusterCache. `touched` may come from any thread.
    The rest is one thread's. may_decide raises RetryLater while this process must not write.
    """

    def __init__(
        self,
        state: ClusterCache,
        api: Api,
        settings: Settings,
        tell: Tell,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._settings, self._tell, self._may_decide = state, settings, tell, may_decide
        self._writer = Writer(api, self._may_write)
        self._known, self._queue = Known(state.records), Queue(clock)
        self._feeding = threading.Lock()
        self._failed = self._cut_off = False
        self._writes = 0
        self._served_last: dict[str, str] = {}  # node → namespace
        self._term = self._term_of_attempt = 0
        self._clock, self._spent = clock, 0.0
        self._paces, self._waits = Paces(clock), Waits(clock)
        self._occupying = Occupying(self._writer, settings, self._paces, self._is_due)

    # Fed by the watches.

    def mtgpupod_changed(self, raw: Raw) -> None:
        self._feed(self._state.mtgpupod_changed, self._known.mtgpupod_changed, raw)

    def mtgpupod_gone(self, raw: Raw) -> None:
        self._feed(self._state.mtgpupod_gone, self._known.mtgpupod_gone, raw)

    def pod_changed(self, raw: Raw) -> None:
        self._feed(self._state.pod_changed, self._known.pod_changed, raw)

    def pod_gone(self, raw: Raw) -> None:
        self._feed(self._state.pod_gone, self._known.pod_gone, raw)

    def node_changed(self, raw: Raw) -> None:
        self._feed(self._state.node_changed, self._known.node_changed, raw)

    def node_gone(self, raw: Raw) -> None:
        self._feed(self._state.node_gone, self._known.node_gone, raw)

    def _feed(self, state: Callable[[Raw], None], known: Callable[[Raw], Collection[str]], raw: Raw) -> None:
        """Both, before anybody looks at both."""
        with self._feeding:
            state(raw)
            nodes = known(raw)
        for node in nodes:
            self._queue.add(node)

    def touched(self, node: str) -> None:
        """Something of its cards has changed, or of who holds them."""
        if self._known.concerns(node):
            self._queue.add(node)

    def items(self) -> Iterator[Raw]:
        """All MtgpuPods that are known, in no particular order (`scheduler.mtgpupods.stored_objects.of_mtgpupod`)."""
        with self._feeding:
            return self._known.items()

    def begin(self) -> None:
        """A term begins, with what was listed since."""
        with self._feeding:
            self._term += 1
            nodes = self._known.nodes()
        for node in nodes:
            self._queue.add(node)

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`, which must be followed by `wake`."""
        self._queue.run(self.look_at, stop)

    def wake(self) -> None:
        self._queue.wake()

    def work(self) -> None:
        """Do all that is due now."""
        while (node := self._queue.next()) is not None:
            self.look_at(node)

    # The controller's thread.

    def look_at(self, node: str) -> None:
        """Make one attempt, of a bounded number of writes.

        What did not work is tried again later, with growing pauses, or as soon as anything changes.
        """
        self._failed, self._cut_off, self._term_of_attempt = False, False, self._term
        self._writes, self._spent = 0, 0.0
        try:
            self._may_decide()
            self._attempt(node)
        except RetryLater:
            return  # whoever may decide next begins with all nodes
        except _Stale as error:
            log.debug("MtgpuPods have changed: %s", error, extra={"node": node})
            self._failed = True
        except (ApiError, Unreachable) as error:
            log.warning("MtgpuPods put off: %s", error, extra={"node": node})
            self._failed = True
        except Exception:
            # The thread's outermost loop: one odd node must not keep the others waiting.
            log.exception("MtgpuPods put off", extra={"node": node})
            self._queue.add(node, MAX_PAUSE)
            return
        if self._failed:
            self._queue.add_again(node)
        else:
            self._queue.done(node)
        if self._cut_off:
            self._queue.add(node, _NEXT_SECONDS)

    def _attempt(self, node: str) -> None:
        left_out, fresh = self._put_finalizers(node)
        found, planned = self._decide(node, left_out)
        refusals = self._occupying.create(node, found, planned)
        self._failed |= refusals.failed
        admitted = {held.uid for held in planned.holdings}
        doubtful: set[str] = set()
        pods = {pod.uid: pod for pod in sorted(found.seen.pods, key=lambda pod: pod.turn)}
        for uid in self._in_turn(node, (*pods, *(broken.uid for broken in found.seen.broken)), found.items):
            if self._is_cut_off(WRITES):
                break
            self._served_last[node] = key_of(found.items[uid])[0]
            item, verdict, pod = found.items[uid], planned.verdicts[uid], pods.get(uid)
            item = read_text(fresh[_version(item)]) if _version(item) in fresh else item
            if pod is not None and uid in admitted and pod.gpuid in refusals.why:
                verdict = replace(verdict, bound=refusals.why[pod.gpuid])
            if verdict.bind and pod is not None and pod.gpuid in doubtful:
                continue
            worked = self._try(node, item, partial(self._serve, item, pod, found.own.get(uid), verdict))
            if not worked and verdict.bind and pod is not None:
                # It may be bound all the same, and their card be another one by now: the watch may be behind.
                doubtful.add(pod.gpuid)
        self._occupying.delete(node, found, planned)

    def _try(self, node: str, item: Raw, act: Callable[[], None]) -> bool:
        """Do this for one MtgpuPod, unless it is put off; return whether it worked.

        A user chooses what is written of an MtgpuPod, and whether the API server accepts it in time. So what fails puts
        off that one, with pauses that grow, and neither its node nor other MtgpuPods.
        """
        (namespace, _), uid, begun = key_of(item), item["metadata"]["uid"], self._clock()
        left = self._waits.left(node, namespace, uid)
        if left:
            self._queue.add(node, left)
            return False
        try:
            act()
        except RetryLater:
            raise
        except (ApiError, Unreachable, _Stale) as error:
            self._take_failure(error, node, item, self._clock() - begun)
            return False
        except Exception:
            # What a user wrote into one MtgpuPod must not keep the others of the node waiting.
            log.exception("MtgpuPod put off", extra={"object": "/".join(key_of(item))})
            self._put_off(node, item, self._clock() - begun)
            return False
        else:
            self._waits.worked(node, namespace, uid, self._clock() - begun)
            return True
        finally:
            self._spent += self._clock() - begun

    def _take_failure(self, error: ApiError | Unreachable | _Stale, node: str, item: Raw, seconds: float) -> None:
        """seconds: that the failure took."""
        where = {"object": "/".join(key_of(item))}
        conflict = isinstance(error, _Stale) or (isinstance(error, ApiError) and error.status in (404, 409))
        if conflict and seconds < SLOW:
            # The watch is about to bring what is newer, and with it the next attempt.
            log.debug("MtgpuPod has changed: %s", error, extra=where)
            self._failed = True
            return
        log.warning("MtgpuPod put off: %s", error, extra=where)
        self._put_off(node, item, seconds)
        if isinstance(error, Unreachable) and seconds < SLOW:
            raise error  # there is no API server at all: the writes of others would fail alike

    def _put_off(self, node: str, item: Raw, seconds: float) -> None:
        namespace, uid = item["metadata"]["namespace"], item["metadata"]["uid"]
        self._waits.failed(node, namespace, uid, seconds)
        self._queue.add(node, self._waits.left(node, namespace, uid))

    def _put_finalizers(self, node: str) -> tuple[Collection[str], Mapping[tuple[str, str], bytes]]:
        """Return the uids of those that did not get it: nothing is begun for them that might be left behind. And those
        that got it, as they are since, by the version before.
        """
        with self._feeding:
            items = self._known.on(node).items
        admitted = self._state.mtgpus.on(node).admitted
        left_out, fresh = set[str](), dict[tuple[str, str], bytes]()

        def put(item: Raw) -> None:
            fresh[_version(item)] = text_of(of_mtgpupod(self._writer.put_finalizer(item)))

        for key in in_turn(items, lambda key: key[0], self._served_last.get(node)):
            item = items[key]
            pod = read(item)
            if not isinstance(pod, MtgpuPod) or pod.deleting or has_finalizer(item):
                continue
            if not (self._serving or pod.bound):
                continue
            done = not self._is_cut_off(FINALIZERS) and self._try(node, item, partial(put, item))
            # One with a reservation got it, and the watch is behind.
            if not done and (pod.uid not in admitted or self._waits.left(node, pod.namespace, pod.uid)):
                left_out.add(pod.uid)
        return left_out, fresh

    def _in_turn(self, node: str, uids: Collection[str], items: Mapping[str, Raw]) -> Iterator[str]:
        return in_turn(uids, lambda uid: key_of(items[uid])[0], self._served_last.get(node))

    def _is_cut_off(self, most: int) -> bool:
        """Return whether this attempt has made so many writes, or as long ones; then another attempt follows."""
        over = self._writes >= most or self._spent >= SECONDS * most / WRITES
        self._cut_off |= over
        return over

    def _may_write(self) -> None:
        self._writes += 1
        self._may_decide()
        if self._term_of_attempt != self._term:
            raise RetryLater("this was decided in an earlier term, and somebody else has led since")

    @property
    def _serving(self) -> bool:
        return mtgpu.enabled(self._settings)

    def _decide(self, node: str, left_out: Collection[str]) -> tuple[Look, Plan]:
        most = self._settings.dialects.mtgpu.max_gpuids
        for _ in range(_TRIES):
            with self._feeding:
                found = look(self._known, self._state, node, serving=self._serving, most=most, left_out=left_out)
            planned = plan(found.seen)
            if self._state.mtgpus.admit(node, planned.holdings, found.version, found.seen.bound, planned.limited):
                if found.recheck is not None:
                    self._queue.add(node, found.recheck)
                return found, planned
        raise _Stale(f"node {node} changes faster than can be decided on it")

    def _is_due(self, node: str, what: str) -> bool:
        """Whether it may be made again. Where the kubelet refuses it, or a scheduler preempts it for a pod that would
        find it there again, that would never end. what: a GPUID, whose occupy pod it is, or the uid of an MtgpuPod.
        """
        left = self._paces.left(node, what)
        if left:
            self._queue.add(node, left)
        return not left

    def _serve(self, item: Raw, pod: MtgpuPod | None, own: Raw | None, verdict: Verdict) -> None:
        """What is decided about one. pod: None where it cannot be read."""
        if verdict.delete and own is not None:
            self._writer.delete(*key_of(item), own["metadata"]["uid"], force=verdict.force)
        if verdict.finish:
            if has_finalizer(item):
                self._finish(item, force=verdict.force)
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if verdict.bind:
            item = self._write(item, next_status(item, verdict, own, now))
            verdict = replace(verdict, bind="")
        status = None
        if verdict.make and pod is not None and verdict.card is not None and self._is_due(pod.node, pod.uid):
            card = verdict.card
            made = manifest(self._whole(item, pod), pod, card.uuid, card.index)
            said = self._make(pod, self._sealed(made, pod.uid))
            if isinstance(said, str):
                status = refused(item, verdict, said, now)
            else:
                verdict = replace(verdict, created=said)
        self._write(item, status or next_status(item, verdict, own, now))

    def _whole(self, item: Raw, pod: MtgpuPod) -> Raw:
        """The MtgpuPod as the API server has it. What it asks for must be what was decided on."""
        whole = self._writer.mtgpupod(item)
        now = read(whole)
        if not isinstance(now, MtgpuPod) or now.decided_by != pod.decided_by:
            raise _Stale(f"{pod.key} has changed since it was looked at")
        return whole

    def _sealed(self, made: dict[str, Any], owner: str) -> Raw:
        made["metadata"]["annotations"] |= self._state.records.sealed_mtgpu(made, owner)
        return made

    def _make(self, pod: MtgpuPod, made: Raw) -> Said | str | None:
        """None: it is there, or about to be; else why not. A text: and never will be."""
        try:
            self._writer.make(made)
        except ApiError as error:
            if error.status in (400, 422) and not any(by in error.message for by in _BY_ADMISSION):
                return error.message
            # A user chooses how many Pods the API server refuses: each waits longer each time.
            self._paces.slow(pod.node, pod.uid)
            self._is_due(pod.node, pod.uid)
            if error.status in (404, 409, 429) or error.status >= 500:
                return None
            return Said(FALSE, "PodForbidden", error.message)
        self._paces.slow(pod.node, pod.uid)
        return None

    def _finish(self, item: Raw, *, force: bool) -> None:
        """Let it go, unless its Pod is there after all: the watch may be behind what was made."""
        found = self._writer.pod(*key_of(item))
        if found is not None and is_own(found, item):
            self._writer.delete(*key_of(item), found["metadata"]["uid"], force=force)
            self._failed = True
        else:
            self._writer.take_finalizer(item)

    def _write(self, item: Raw, status: Mapping[str, Any]) -> Raw:
        """The MtgpuPod as it is with this status."""
        before = item.get("status") or {}
        if status == before:
            return item
        written = self._writer.status(item, status)
        meta = item["metadata"]
        reference = {"apiVersion": mtgpu.API_VERSION, "kind": mtgpu.KIND} | {
            key: meta[key] for key in ("namespace", "name", "uid")
        }
        for transition in transitions(before, status):
            self._tell(reference, transition)
        return written


def _version(item: Raw) -> tuple[str, str]:
    meta = item["metadata"]
    return meta["uid"], meta["resourceVersion"]
