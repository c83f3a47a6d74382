"""The MtgpuPod controller. It gives MtgpuPods their cards and creates their Pods, on a thread of its own.

`scheduler.runtime` runs it. The thread works while this replica leads. It reconciles node by node: it observes the node
(`observation`), computes a plan (`node_plan`), reserves the planned cards in the ClusterCache, and makes the writes
(`mtgpupod_writer`). Each attempt derives everything from the objects of the API server, so nothing is lost if the
process crashes between two writes.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import MtgpuPodsAffected
from scheduler.cluster.mtgpupod_objects import Raw, key_of
from scheduler.cluster.stored_objects import decode, encode, stored_mtgpupod
from scheduler.mtgpupods.fairness import (
    FINALIZER_WRITES,
    SLOW_SECONDS,
    AttemptBudget,
    Backoffs,
    WriteBackoffs,
    in_turn,
)
from scheduler.mtgpupods.mtgpupod_writer import MtgpuPodApi, MtgpuPodWriter, RecordEvent, StaleObject, has_finalizer
from scheduler.mtgpupods.node_plan import NodePlan, plan_node
from scheduler.mtgpupods.observation import Observation, observe, read_stored
from scheduler.work_queue import MAX_PAUSE, Queue

log = logging.getLogger(__name__)

_NEXT_ATTEMPT_SECONDS = 0.05
"""The pause before the next attempt if an attempt has used up its budget of writes.

Meanwhile the watch delivers the written objects.
"""
_TRIES = 50
"""The most plans of one attempt. A plan is discarded if the node has changed since it was observed."""


class MtgpuPodController:
    """Reconciles the MtgpuPods of all nodes.

    Any thread may call `affected`, `begin` and `wake`. The other methods belong to the thread of `run`.

    Args:
        event: Creates an Event about an object (`RecordEvent`).
        may_decide: A function that raises RetryLater while this process must not write.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        api: Api,
        settings: Settings,
        event: RecordEvent,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._may_decide = may_decide
        self._clock = clock
        self._queue = Queue(clock)
        self._write_backoffs = WriteBackoffs(clock)
        self._api = MtgpuPodApi(api, self._before_write)
        self._writer = MtgpuPodWriter(self._api, settings, cluster.records, self._queue, Backoffs(clock), event)
        self._served_last: dict[str, str] = {}  # By node, the namespace that was served last.
        self._term = 0
        # These attributes belong to the current attempt.
        self._term_of_attempt = 0
        self._failed = False
        self._budget = AttemptBudget()

    def affected(self, event: MtgpuPodsAffected) -> None:
        """Queue the node of this event of the ClusterCache."""
        self._queue.add(event.node)

    def begin(self) -> None:
        """Begin a term as leader: queue every node. The ClusterCache must be in sync."""
        self._term += 1
        for node in self._cluster.mtgpupods.nodes():
            self._queue.add(node)

    def run(self, stop: threading.Event) -> None:
        """Reconcile nodes until `stop` is set. Call `wake` after setting it."""
        self._queue.run(self.reconcile, stop)

    def wake(self) -> None:
        self._queue.wake()

    def work(self) -> None:
        """Reconcile all nodes that are due, and return."""
        while (node := self._queue.next()) is not None:
            self.reconcile(node)

    # One attempt on a node.

    def reconcile(self, node: str) -> None:
        """Make one attempt on a node, with a bounded number of writes.

        After a failure the next attempt follows after a pause, which grows each time, or as soon as an object changes.
        """
        self._term_of_attempt = self._term
        self._failed = False
        self._budget = AttemptBudget()
        try:
            self._may_decide()
            self._attempt(node)
        except RetryLater:
            return  # The next leader reconciles all nodes.
        except StaleObject as error:
            log.debug("MtgpuPods have changed: %s", error, extra={"node": node})
            self._failed = True
        except (ApiError, Unreachable) as error:
            log.warning("MtgpuPods not reconciled: %s", error, extra={"node": node})
            self._failed = True
        except Exception:
            # Nothing outside of this function handles errors. An error on one node must not keep the others waiting.
            log.exception("MtgpuPods not reconciled", extra={"node": node})
            self._queue.add(node, MAX_PAUSE)
            return
        if self._failed:
            self._queue.add_again(node)
        else:
            self._queue.done(node)
        if self._budget.is_exceeded:
            self._queue.add(node, _NEXT_ATTEMPT_SECONDS)

    def _attempt(self, node: str) -> None:
        left_out, fresh = self._add_finalizers(node)
        observed, plan = self._decide(node, left_out)
        failures = self._writer.create_occupy_pods(observed.node, plan.occupy_pod_steps)
        self._failed |= failures.any
        reserved = {held.uid for held in plan.reservations}
        pods = {pod.uid: pod for pod in sorted(observed.node.pods, key=lambda pod: pod.queue_key)}
        doubtful_gpuids: set[str] = set()
        for uid in self._in_turn(node, (*pods, *(pod.uid for pod in observed.node.unreadable)), observed.items):
            if self._budget.is_used_up():
                break
            item = observed.items[uid]
            desired, pod = plan.desired[uid], pods.get(uid)
            self._served_last[node] = key_of(item)[0]
            item = decode(fresh[_version(item)]) if _version(item) in fresh else item
            if pod is not None and uid in reserved and pod.gpuid in failures.conditions:
                desired = replace(desired, bound=failures.conditions[pod.gpuid])
            if desired.bind and pod is not None and pod.gpuid in doubtful_gpuids:
                continue
            write = partial(self._writer.write, item, pod, observed.pods.get(uid), desired)
            if not self._try(node, item, write) and desired.bind and pod is not None:
                # The failed write may have taken effect, and a new occupy pod may have another card, which the watch
                # has not delivered yet. Binding other MtgpuPods could then put the GPUID on two cards.
                doubtful_gpuids.add(pod.gpuid)
        self._writer.delete_occupy_pods(observed.node, plan.occupy_pod_steps)

    def _add_finalizers(self, node: str) -> tuple[Collection[str], Mapping[tuple[str, str], bytes]]:
        """Add the finalizer to the MtgpuPods of the node that do not have it yet.

        Returns:
            The UIDs of the MtgpuPods to leave out of the plan, and the JSON of the MtgpuPods that got the finalizer, by
            UID and former resourceVersion. An MtgpuPod without the finalizer must get no Pod, because nothing would
            delete the Pod.
        """
        snapshot = self._cluster.mtgpupods.snapshot(node)
        items = snapshot.objects.items
        reservations = snapshot.node.admitted
        left_out, fresh = set[str](), dict[tuple[str, str], bytes]()

        def add(item: Raw) -> None:
            fresh[_version(item)] = encode(stored_mtgpupod(self._api.add_finalizer(item)))

        for key in in_turn(items, lambda key: key[0], self._served_last.get(node)):
            item = items[key]
            pod = read_stored(item)
            if not isinstance(pod, MtgpuPod) or pod.deleting or has_finalizer(item):
                continue
            if not (self._is_enabled or pod.card_uuid):
                continue
            done = not self._budget.is_used_up(FINALIZER_WRITES) and self._try(node, item, partial(add, item))
            # An MtgpuPod with a reservation has its finalizer, but the watch may not have delivered it yet.
            if not done and (
                pod.uid not in reservations or self._write_backoffs.remaining(node, pod.namespace, pod.uid)
            ):
                left_out.add(pod.uid)
        return left_out, fresh

    def _decide(self, node: str, left_out: Collection[str]) -> tuple[Observation, NodePlan]:
        """Plan the node and add the reservations of the plan to the ClusterCache.

        Raises StaleObject if the node changes faster than it can be planned.
        """
        limit = self._settings.dialects.mtgpu.max_gpuids
        for _ in range(_TRIES):
            observed = observe(self._cluster, node, enabled=self._is_enabled, gpuid_limit=limit, left_out=left_out)
            plan = plan_node(observed.node)
            if self._cluster.mtgpupods.admit(
                node, plan.reservations, observed.version, observed.node.gpuid_limit, plan.limited_namespaces
            ):
                if observed.recheck_seconds is not None:
                    self._queue.add(node, observed.recheck_seconds)
                return observed, plan
        raise StaleObject(f"node {node} changes faster than its MtgpuPods can be planned")

    def _try(self, node: str, item: Raw, write: Callable[[], None]) -> bool:
        """Call `write` for one MtgpuPod unless the MtgpuPod is paused. Return whether it was called and succeeded.

        The content of an MtgpuPod determines whether and how fast the API server accepts the write. So a fast failure
        pauses only that MtgpuPod, and a slow one also its namespace. If a connection fails fast, the function raises
        Unreachable, because the other writes would fail too.
        """
        (namespace, _), uid = key_of(item), item["metadata"]["uid"]
        begun = self._clock()
        remaining = self._write_backoffs.remaining(node, namespace, uid)
        if remaining:
            self._queue.add(node, remaining)
            return False
        try:
            write()
        except RetryLater:
            raise
        except (ApiError, Unreachable, StaleObject) as error:
            self._handle_failure(error, node, item, self._clock() - begun)
            return False
        except Exception:
            # The content of one MtgpuPod may cause the error. It must not keep the others of the node waiting.
            log.exception("MtgpuPod not reconciled", extra={"object": "/".join(key_of(item))})
            self._pause(node, item, self._clock() - begun)
            return False
        else:
            self._write_backoffs.succeeded(node, namespace, uid, self._clock() - begun)
            return True
        finally:
            self._budget.seconds += self._clock() - begun

    def _handle_failure(
        self, error: ApiError | Unreachable | StaleObject, node: str, item: Raw, seconds: float
    ) -> None:
        extra = {"object": "/".join(key_of(item))}
        is_conflict = isinstance(error, StaleObject) or (isinstance(error, ApiError) and error.status in (404, 409))
        if is_conflict and seconds < SLOW_SECONDS:
            # The watch is about to deliver the current object, which causes the next attempt.
            log.debug("MtgpuPod has changed: %s", error, extra=extra)
            self._failed = True
            return
        log.warning("MtgpuPod not reconciled: %s", error, extra=extra)
        self._pause(node, item, seconds)
        if isinstance(error, Unreachable) and seconds < SLOW_SECONDS:
            raise error  # Without an API server, the writes for the other MtgpuPods would fail too.

    def _pause(self, node: str, item: Raw, seconds: float) -> None:
        namespace, uid = item["metadata"]["namespace"], item["metadata"]["uid"]
        self._write_backoffs.failed(node, namespace, uid, seconds)
        self._queue.add(node, self._write_backoffs.remaining(node, namespace, uid))

    def _in_turn(self, node: str, uids: Collection[str], items: Mapping[str, Raw]) -> Iterator[str]:
        return in_turn(uids, lambda uid: key_of(items[uid])[0], self._served_last.get(node))

    def _before_write(self) -> None:
        self._budget.writes += 1
        self._may_decide()
        # The last write may have taken so long that another replica has led meanwhile. Then this plan is outdated.
        if self._term_of_attempt != self._term:
            raise RetryLater("this plan was made in an earlier term, and another replica may have led since")

    @property
    def _is_enabled(self) -> bool:
        return mtgpu.enabled(self._settings)


def _version(item: Raw) -> tuple[str, str]:
    meta = item["metadata"]
    return meta["uid"], meta["resourceVersion"]
