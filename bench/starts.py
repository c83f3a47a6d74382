"""Pods that start per second on one node, without a lock and with a node lock as in HAMi's scheduler.

The lock is an annotation of the Node. It is held from the bind until the kubelet has the answer to Allocate, so pods
start one by one. The ratio is a lower bound for the cost of the lock, for two reasons. Here the next binder continues
as soon as the lock is free, whereas in HAMi the bind fails and the pod is retried after a back-off. And the API server,
the kubelet and the binders share one Python process, which limits the rate without a lock.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from bench.node import CARDS, Bench, bench, record, share
from bench.rows import Options, Row
from mgpu.kube import Api
from tests.deviceplugin.node import NODE, PODS
from tests.waiting import until

COUNT, ROUNDS = 100, 3
_LOCK = "hami.io/mutex.lock"

Binder = Callable[[str, Callable[[], None]], None]
"""Binds one pod, given its UID and a function that makes the binding."""


def rows(options: Options) -> Iterator[Row]:
    turns = options.repeats(ROUNDS)
    with bench() as made:
        lock = NodeLock(made)
        binders: dict[str, Binder] = {"locked": lock.bind, "free": lambda _, bind: bind()}
        rates: dict[str, list[float]] = {name: [] for name in binders}
        for turn in range(turns):
            for i, (name, binder) in enumerate(binders.items()):
                rates[name].append(_turn(made, f"p{turn}-{i}", binder))
    free = rates["free"]
    yield Row(
        what=f"binding to running, {COUNT} equal pods",
        value=statistics.median(free),
        unit="pods/s",
        reference=statistics.median(rates["locked"]),
        reference_name="node lock",
        more_is_better=True,
        remark=f"{min(free):.1f} to {max(free):.1f} in {turns} turns",
    )


def _turn(made: Bench, name: str, binder: Binder) -> float:
    """Return how many pods per second start. The pods are deleted afterwards."""
    names = [f"{name}-{i}" for i in range(COUNT)]
    uids = {n: made.api.create(PODS, share(n))["metadata"]["uid"] for n in names}
    cards = {n: i % CARDS for i, n in enumerate(names)}

    def bind(pod: str) -> None:
        binder(uids[pod], lambda: _bind(made.api, pod, cards[pod]))

    began = time.perf_counter()
    with ThreadPoolExecutor(COUNT) as binders:
        for _ in binders.map(bind, names):
            pass
    runtime = made.node.runtime
    until(lambda: sum(c.running for c in runtime.containers()) == COUNT, 120)
    took = time.perf_counter() - began
    for container in runtime.containers():
        if container.running and container.env["NVIDIA_VISIBLE_DEVICES"] != f"GPU-n1-{cards[container.pod]}":
            raise RuntimeError(f"{container.pod} does not run on the card of its allocation record")
    for pod in names:
        made.api.delete(f"{PODS}/{pod}", {"gracePeriodSeconds": 0})
    until(lambda: not any(c.running for c in runtime.containers()), 120)
    return COUNT / took


def _bind(api: Api, pod: str, card: int) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod, "annotations": record(card)},
        "target": {"kind": "Node", "name": "n1"},
    }
    api.create(f"{PODS}/{pod}/binding", body)


class NodeLock:
    def __init__(self, made: Bench) -> None:
        self._made, self._lock = made, threading.Lock()

    def bind(self, uid: str, bind: Callable[[], None]) -> None:
        with self._lock:
            self._hold(uid, bind)

    def _hold(self, uid: str, bind: Callable[[], None]) -> None:
        """Bind the pod, and hold the lock until the kubelet has the answer to Allocate for the pod."""
        self._made.api.patch(NODE, {"metadata": {"annotations": {_LOCK: uid}}})
        bind()
        while not self._made.node.kubelet.devices.ids(uid, "c"):
            time.sleep(0.001)
        self._made.api.patch(NODE, {"metadata": {"annotations": {_LOCK: None}}})
