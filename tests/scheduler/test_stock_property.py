"""NVIDIA's plugin and mgpu on one node, whatever happens in which order: no card is given out by both."""

import contextlib
import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mgpu.kube import ApiError
from mgpu.model.device_checkpoints import CHECKPOINTS, CheckpointEntry, write_entries
from mgpu.model.errors import RetryLater
from scheduler.cluster.gpu_pods import read_gpu_pod, recorded_shares
from tests import builders as b
from tests.clock import Clock
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, Replica, admitted, cluster

CARDS = 3
WHOLE = "nvidia.com/gpu"
which = st.integers(0, 20)


def plain(name: str, counts: list[int]) -> dict[str, Any]:
    containers = []
    for i, count in enumerate(counts):
        amounts = {WHOLE: str(count)}
        containers.append({"name": f"c{i}", "resources": {"requests": amounts, "limits": dict(amounts)}})
    return b.pod(name, *containers)


class Both(RuleBasedStateMachine):
    """The kubelet gives a pod its cards at once, a container at a time, any that are free; the node reports it later.

    given: (uid, container) → cards, as the kubelet has it. told: which of them the node has told of.
    """

    @initialize()
    def begin(self) -> None:
        self.clock, self.api = Clock(), cluster(("n1", CARDS))
        self.api.put("nodes", b.node("n1", labels={"mgpu.io/whole-cards": "nvidia"}))
        self.given: dict[tuple[str, str], list[str]] = {}
        self.told: set[tuple[str, str]] = set()
        self.created = 0
        self.restart()

    @rule()
    def restart(self) -> None:
        self.api.watchers.clear()
        self.replica = Replica(self.api, self.clock)
        self.api.admit = admitted(self.replica)

    def bound(self) -> list[dict[str, Any]]:
        return [p for p in self.api.pods.values() if p["spec"].get("nodeName") and p["status"]["phase"] != "Succeeded"]

    def bind(self, raw: dict[str, Any]) -> bool:
        self.api.put("pods", raw)
        with contextlib.suppress(ApiError, RetryLater):
            self.api.bind(raw["metadata"]["name"], "n1")
            return True
        return False

    def name(self) -> str:
        self.created += 1
        return f"p{self.created}"

    @rule(core=st.sampled_from([30, 60, 100]))
    def a_share(self, core: int) -> None:
        self.bind(b.pod(self.name(), b.container("c", core, None if core == 100 else 1024)))

    @rule(counts=st.sampled_from([[1], [2], [1, 1]]), data=st.data())
    def a_whole_card_pod(self, counts: list[int], data: st.DataObject) -> None:
        free = [f"GPU-n1-{i}" for i in range(CARDS) if not any(f"GPU-n1-{i}" in own for own in self.given.values())]
        if sum(counts) > len(free):
            return  # NodeResourcesFit
        raw = plain(self.name(), counts)
        if self.bind(raw):
            order = data.draw(st.permutations(free))
            for i, count in enumerate(counts):
                self.given[raw["metadata"]["uid"], f"c{i}"] = sorted(order[:count])
                order = order[count:]

    @rule(unseen=st.integers(0, 4))
    def the_node_tells(self, unseen: int) -> None:
        """All but the last few containers: they were given their cards while the agent read."""
        self.told |= set(list(self.given)[: max(0, len(self.given) - unseen)])
        rows = [
            CheckpointEntry(uid, c, WHOLE, tuple(own)) for (uid, c), own in self.given.items() if (uid, c) in self.told
        ]
        device = json.loads(json.dumps(self.api.devices["n1"]))
        device["metadata"]["annotations"] = {CHECKPOINTS: write_entries(rows)}
        self.api.put("devices", device)

    @rule(which=which, what=st.sampled_from(["deleted", "ended"]))
    def a_pod_goes(self, which: int, what: str) -> None:
        pods = self.bound()
        if not pods:
            return
        meta = pods[which % len(pods)]["metadata"]
        if what == "deleted":
            self.api.remove("pods", meta["name"])
        else:
            self.api.edit_pod(meta["name"], lambda raw: raw["status"].update(phase="Succeeded"))
        self.given = {key: own for key, own in self.given.items() if key[0] != meta["uid"]}

    @rule(kind=st.sampled_from(["nodes", "devices", "pods"]), count=st.integers(1, 3))
    def events_arrive(self, kind: str, count: int) -> None:
        self.replica.deliver(kind, count)

    @rule()
    def time_passes(self) -> None:
        self.clock.now += 31
        self.replica.decider.check_overdue()
        self.replica.late.work()

    @invariant()
    def no_card_is_given_out_twice(self) -> None:
        theirs = {card for own in self.given.values() for card in own}
        for raw in self.bound():
            known = read_gpu_pod(raw, SETTINGS)
            assert known is not None
            ours = {f"GPU-n1-{share.card}" for share in recorded_shares(known) or ()}
            assert not ours & theirs, (raw["metadata"]["name"], theirs)


TestBoth = Both.TestCase
TestBoth.settings = examples(18, steps=30)
