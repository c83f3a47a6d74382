"""Claims and classic pods get cards in parallel threads without overcommitting a card, while watches are late."""

import threading
from collections import Counter, deque
from contextlib import suppress
from typing import Any

from mgpu.kube import ApiError
from mgpu.model.claim_object import read_claim
from mgpu.model.errors import RetryLater
from mgpu.model.resource_claims import Claim, claim_holding
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.scheduler.claim_objects import allocate, allocated, claim, request, result, serving, submit
from tests.scheduler.fake import Replica

NODES, CARDS, WRITERS = 3, 4, 3
NAMES = [f"n{i}" for i in range(NODES)]
INDEX = "vke.volcengine.com/gpu-index-container-c"
DEADLINE = 60.0


class Writer(threading.Thread):
    """Allocates claims and binds pods on any node until the queue is empty. Those that were denied are queued again."""

    def __init__(self, replica: Replica, queue: deque[str], number: int) -> None:
        super().__init__(daemon=True)
        self.replica, self.queue, self.tries = replica, queue, number

    def run(self) -> None:
        while self.queue:
            try:
                name = self.queue.popleft()
            except IndexError:
                return
            self.tries += 1
            try:
                self.write(name, NAMES[self.tries % NODES])
            except (ApiError, RetryLater):
                self.queue.append(name)

    def write(self, name: str, node: str) -> None:
        if name.startswith("p"):
            self.replica.api.bind(name, node)
        else:
            allocate(self.replica.api, name, result("card-0", node=node, cores="50", memory="1Gi"))


def test_claims_and_pods_fill_all_cards_without_overlap() -> None:
    replica = serving(*((name, CARDS) for name in NAMES))
    total = 2 * NODES * CARDS
    names = [f"{'pc'[i % 2]}{i}" for i in range(total)]
    for name in names:
        if name.startswith("p"):
            replica.api.put("pods", b.share(name, 50))
        else:
            submit(replica.api, claim(name, request(cores=50, memory="1Gi")))
    replica.deliver()
    queue = deque(names)
    writers = [Writer(replica, queue, i) for i in range(WRITERS)]
    stop = threading.Event()

    def deliver() -> None:
        while not stop.wait(0.001):
            replica.deliver("resourceclaims", 2)
            replica.deliver("pods", 1)

    watch = threading.Thread(target=deliver, daemon=True)
    watch.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(DEADLINE)
        assert not writer.is_alive()
    stop.set()
    watch.join(DEADLINE)
    replica.deliver()
    used: Counter[tuple[Any, str]] = Counter()
    for raw in replica.api.pods.values():
        used[raw["spec"]["nodeName"], raw["metadata"]["annotations"][INDEX]] += 50
    for raw in replica.api.resourceclaims.values():
        holding = claim_holding(read_claim(raw))
        assert holding is not None
        used[holding.node, str(holding.shares[0].card)] += 50
    assert set(used.values()) == {100}
    assert len(used) == NODES * CARDS
    assert replica.state.holdings() == Replica(replica.api).state.holdings()


def test_duplicate_calls_in_parallel_get_the_same_card() -> None:
    """The API server calls the webhook twice for some writes."""
    replica = serving(("n1", 8))
    submit(replica.api, *(claim(f"c{i}", request(cores=100, memory="1Gi")) for i in range(8)))
    found: dict[str, set[tuple[int, ...]]] = {f"c{i}": set() for i in range(8)}

    def decide(name: str) -> None:
        one = decided(replica, read_claim(written(replica, name)))
        found[name].add(one.placement.cards("gpu"))

    threads = [threading.Thread(target=decide, args=(name,), daemon=True) for name in found for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert all(len(cards) == 1 for cards in found.values())
    assert len({cards.pop() for cards in found.values()}) == 8


def written(replica: Replica, name: str) -> dict[str, Any]:
    return allocated(replica.api.claim(name), result("card-0", cores="100", memory="1Gi"))


def decided(replica: Replica, one: Claim) -> Reservation:
    while True:
        with suppress(RetryLater):
            decision = replica.claim_decider.decide(one)
            assert isinstance(decision, Reservation)
            return decision


def test_allocation_that_arrives_during_a_decision_ends_the_decision(monkeypatch: Any) -> None:
    """The watch delivers it on another node between the snapshot and the reservation."""
    replica = serving(("n1", 1), ("n2", 1))
    submit(replica.api, claim("c", request(cores=100, memory="1Gi")))
    replica.deliver()
    late = read_claim(written(replica, "c"))
    elsewhere = result("card-0", node="n2", cores="100", memory="1Gi")
    submit(replica.api, allocated(replica.api.claim("c"), elsewhere))
    search = replica.claim_decider._search

    def search_slowly(*args: Any) -> Any:
        placement = search(*args)
        replica.deliver()
        return placement

    monkeypatch.setattr(replica.claim_decider, "_search", search_slowly)
    assert replica.claim_decider.decide(late) is None
    assert [(h.uid, h.node, h.bound) for h in replica.state.holdings()] == [("uid-c", "n2", True)]
