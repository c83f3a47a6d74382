"""Several scheduler profiles fill a cluster at the same time without overcommitting a card."""

import threading
from collections import Counter, deque
from typing import Any

from mgpu.kube import ApiError
from tests import builders as b
from tests.scheduler.fake import Replica, admitted, cluster

NODES, CARDS, PROFILES = 8, 4, 4
NAMES = [f"n{i}" for i in range(NODES)]
INDEX = "vke.volcengine.com/gpu-index-container-c"
DEADLINE = 60.0


class Profile(threading.Thread):
    """Filters, prioritizes and binds pods until the queue is empty. Rejected pods are queued again."""

    def __init__(self, replica: Replica, queue: deque[str]) -> None:
        super().__init__(daemon=True)
        self.replica, self.queue = replica, queue
        self.bound = self.refused = 0

    def run(self) -> None:
        while self.queue:
            try:
                name = self.queue.popleft()
            except IndexError:
                return
            if not self.schedule(name):
                self.refused += 1
                self.queue.append(name)

    def schedule(self, name: str) -> bool:
        known = self.replica.state.gpu_pod(f"uid-{name}")
        assert known is not None
        passed = self.replica.filter.filter(known, NAMES).passed
        if not passed:
            return False
        scores = self.replica.filter.scores(known, passed)
        node = max(zip(scores, passed, strict=True))[1]
        try:
            self.replica.api.bind(name, node)
        except ApiError:
            return False
        self.bound += 1
        return True


def test_concurrent_profiles_fill_all_cards_without_overlap() -> None:
    replica = Replica(cluster(*((name, CARDS) for name in NAMES)))
    replica.api.admit = admitted(replica)
    pods = [f"p{i}" for i in range(2 * NODES * CARDS)]
    for name in pods:
        replica.api.put("pods", b.share(name, 50))
    replica.deliver()
    queue = deque(pods)
    profiles = [Profile(replica, queue) for _ in range(PROFILES)]
    for profile in profiles:
        profile.start()
    for profile in profiles:
        profile.join(DEADLINE)
        assert not profile.is_alive()
    assert sum(profile.bound for profile in profiles) == len(pods)
    used: Counter[tuple[Any, str]] = Counter()
    for raw in replica.api.pods.values():
        used[raw["spec"]["nodeName"], raw["metadata"]["annotations"][INDEX]] += 50
    assert set(used.values()) == {100}
    assert len(used) == NODES * CARDS
    assert sum(profile.refused for profile in profiles) < len(pods)


def test_sequential_bindings_are_never_rejected() -> None:
    """The next filter counts a decision before the watch delivers the pod."""
    replica = Replica(cluster(*((name, CARDS) for name in NAMES)))
    replica.api.admit = admitted(replica)
    pods = [f"p{i}" for i in range(4 * NODES * CARDS)]
    for name in [*pods, "one-too-many"]:
        replica.api.put("pods", b.share(name, 25))
    replica.deliver()
    profile = Profile(replica, deque(pods))
    profile.run()
    assert (profile.bound, profile.refused) == (len(pods), 0)
    known = replica.state.gpu_pod("uid-one-too-many")
    assert known is not None
    assert replica.filter.filter(known, NAMES).passed == []
