"""Live resizes, whatever happens in whatever order: no container may use memory that the ledger gives to another pod.

The scheduler's and the agent's own code run against one API server, which both see late. Writes fail, get lost, or
arrive late; either process starts again; containers start again, and use what they may.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.backend import Unable
from deviceplugin.isolation.resizing import REASON, Resizer
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.kube import ApiError, Unreachable
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.model.resizing import APPLIED, RESIZE, read_applied, read_sizes
from mgpu.settings import load_settings
from scheduler.cluster.gpu_pods import read_gpu_pod, recorded_shares
from tests import builders as b
from tests.clock import Clock
from tests.examples import examples
from tests.scheduler.fake import FakeApi, Raw, Replica, admitted

SETTINGS = load_settings("scheduler: {resize: any}")
CARDS = b.cards(1, gib=12)
GIB = b.GIB
NAMES = ("p", "q", "r")
FEW = (0, 1, 1, 2, 4, 9)
FATES = ("lands", "lands", "lands", "lost", "late", "no answer")
Key = tuple[str, str]


Event = Callable[["Cluster", Random], None]


class FlakyApi(FakeApi):
    """fate: what happens to the next write of the scheduler. late: writes that arrive later, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.fate = "lands"
        self.late: list[tuple[str, Raw]] = []

    def patch(self, path: str, body: Raw) -> Raw:
        fate, self.fate = self.fate, "lands"
        if fate == "late":
            self.late.append((path, body))
        if fate in ("late", "lost"):
            raise Unreachable(fate)
        answer = self.arrive(path, body)
        if fate == "no answer":
            raise Unreachable(fate)
        return answer

    def arrive(self, path: str, body: Raw) -> Raw:
        return super().patch(path, body)


class Pause:
    """A point at which a coroutine lets others run."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@dataclass
class Running:
    """A container. limit: in force; None while it starts. next: the limit with which it starts."""

    limit: int | None
    use: int = 0
    next: int = 0


@dataclass
class Containers:
    """The containers of the node, and what limits them, as the driver does: no limit below the present use."""

    running: dict[Key, Running] = field(default_factory=dict)
    checking: list[tuple[Key, int]] | None = None

    def unresizable(self, target: Target) -> Unable | None:
        return None if target.key in self.running else Unable("it does not run")

    async def resize(self, target: Target) -> Unable | None:
        (share,) = target.limited_shares
        await Pause()
        while self.checking is not None:
            await Pause()
        return self.limit(target.key, share.memory)

    def limit(self, key: Key, limit: int) -> Unable | None:
        found = self.running.get(key)
        if found is None or found.limit is None:
            return Unable("it does not run")
        if found.use > limit:
            return Unable(f"it uses {found.use}")
        found.limit = limit
        return None


class Agent:
    """An agent with its view of the pods, its resizes, and the writes that it has sent or will send."""

    def __init__(self, api: FlakyApi, node: Containers) -> None:
        self.pods = NodePods(SETTINGS, lambda: None)
        self.waiting: deque[tuple[str, Raw]] = deque()
        self.writes: deque[tuple[GpuPod, dict[str, str]]] = deque()
        self.said: list[str] = []
        self.work: Coroutine[Any, Any, bool] | None = None
        self.resizer = Resizer(
            self.pods,
            node,
            self,
            self,
            lambda: CARDS,
            lambda: True,
            Wakeup(),
            lambda gpu_pod, text: self.said.append(f"{gpu_pod.pod.name}: {text}"),
        )
        for raw in api.pods.values():
            self.take("changed", raw)

    def write(self, gpu_pod: GpuPod, annotations: Any) -> None:
        self.writes.append((gpu_pod, dict(annotations)))

    def write_receipt(self, *args: Any) -> None:
        """Receipts are not part of this test."""

    def take(self, what: str, raw: Raw) -> None:
        if what == "gone":
            self.pods.drop(raw)
        elif raw["spec"].get("nodeName"):
            self.pods.take(raw)

    def step(self) -> None:
        """Go on with the resizes until the next pause."""
        self.work = self.work or self.resizer.reconcile(self.pods.all())
        try:
            self.work.send(None)
        except StopIteration:
            self.work = None

    def close(self) -> None:
        if self.work is not None:
            self.work.close()


class Cluster:
    """The methods without an underscore are what may happen."""

    def __init__(self) -> None:
        self.api = FlakyApi()
        self.api.put("nodes", b.node("n1"))
        self.api.put("devices", write_device(Node("n1"), "", CARDS))
        self.node = Containers()
        self.clock = Clock()
        client: Any = self.api
        self.replicas = [Replica(client, self.clock, SETTINGS) for _ in range(2)]
        self._lead(0)
        self.agent = Agent(self.api, self.node)
        self.api.watchers.append(self._tell_agent)
        self.created = 0
        for name in "pq":
            self._bind(name, [1, 2])
            self.everybody_catches_up()
            self._start(name)
            self._run(name)
            self._want(name, {"a": 2, "b": 1})
        self.everybody_catches_up()

    def _tell_agent(self, kind: str, what: str, raw: Raw) -> None:
        if kind == "pods":
            self.agent.waiting.append((what, raw))

    def _lead(self, which: int) -> None:
        for replica in self.replicas:
            replica.leading = False
        self.leader = self.replicas[which]
        self.leader.deliver()
        self.leader.leading = True
        for uid in self.leader.state.resizes.pods():
            self.leader.resizing.add(uid)
        self.api.admit = admitted(self.leader)

    def _bound(self) -> list[Raw]:
        return [raw for raw in self.api.pods.values() if raw["spec"].get("nodeName")]

    # What users do

    def a_user_resizes(self, r: Random) -> None:
        wanted = {container: r.choice((0, 1, 1, 2, 2, 3, 4)) for container in "ab"}
        self._want(r.choice(NAMES), {container: gib for container, gib in wanted.items() if gib})

    def _want(self, name: str, wanted: dict[str, int]) -> None:
        """Replace the annotation."""
        if ("default", name) not in self.api.pods:
            return
        has = {c["name"] for c in self.api.pod(name)["spec"]["containers"]}
        text = ",".join(f"{c}={gib}Gi" for c, gib in sorted(wanted.items()) if c in has)

        def change(raw: Raw) -> None:
            raw["metadata"]["annotations"].pop(RESIZE, None)
            if text:
                raw["metadata"]["annotations"][RESIZE] = text

        self.api.edit_pod(name, change)

    def a_pod_is_bound(self, r: Random) -> None:
        self._bind(r.choice(NAMES), r.choice(([1], [2], [1, 2], [3, 1])))

    def _bind(self, name: str, amounts: list[int]) -> None:
        if ("default", name) not in self.api.pods:
            self.created += 1
            made = [b.container(c, 5, gib * 1024) for c, gib in zip("ab", amounts, strict=False)]
            self.api.put("pods", b.pod(name, *made, uid=f"{name}-{self.created}"))
        with contextlib.suppress(ApiError):
            self.api.bind(name, "n1")

    def a_pod_is_evicted_or_preempted(self, r: Random) -> None:
        name = r.choice(NAMES)
        raw = self.api.pods.get(("default", name))
        if raw is not None:
            for key in [key for key in self.node.running if key[0] == raw["metadata"]["uid"]]:
                del self.node.running[key]
            self.api.remove("pods", name)

    def everybody_catches_up(self, r: Random | None = None) -> None:  # noqa: ARG002
        if self.node.checking is not None:
            self._check()
        for _ in range(4):
            self._settle()

    # What the scheduler does

    def a_scheduler_acts(self, r: Random) -> None:
        self.leader.deliver("pods", r.choice(FEW))
        self.api.fate = r.choice(FATES)
        self.clock.now += r.choice((0, 0, 10))
        self.leader.resizing.work()
        self.api.fate = "lands"

    def a_late_write_arrives(self, r: Random) -> None:
        if self.api.late:
            late = self.api.late.pop(r.randrange(len(self.api.late)))
            with contextlib.suppress(ApiError):
                self.api.arrive(*late)

    def another_replica_leads(self, r: Random) -> None:
        """The new leader waits until the writes of the last one have arrived or have failed (`FencedApi`)."""
        self.api.late.clear()
        which = r.randrange(2)
        if r.random() < 0.3:
            client: Any = self.api
            self.replicas[which] = Replica(client, self.clock, SETTINGS)
        self._lead(which)

    # What happens on the node

    def the_agent_acts(self, r: Random) -> None:
        self._deliver_to_agent(r.choice(FEW))
        for _ in range(r.choice(FEW)):
            self.agent.step()
        for _ in range(min(r.choice(FEW), len(self.agent.writes))):
            self._write_of_the_agent_arrives()

    def _deliver_to_agent(self, count: int) -> None:
        for _ in range(min(count, len(self.agent.waiting))):
            self.agent.take(*self.agent.waiting.popleft())

    def _write_of_the_agent_arrives(self) -> None:
        gpu_pod, annotations = self.agent.writes.popleft()
        pod = gpu_pod.pod
        with contextlib.suppress(ApiError):
            body = {"metadata": {"uid": pod.uid, "annotations": annotations}}
            self.api.arrive(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", body)

    def the_agent_restarts(self, r: Random) -> None:
        """What the last agent has sent arrives before the next one lists the pods, or never."""
        while self.agent.writes and r.random() < 0.7:
            self._write_of_the_agent_arrives()
        self.agent.close()
        self.node.checking = None
        self.agent = Agent(self.api, self.node)

    def the_driver_is_checked(self, r: Random) -> None:  # noqa: ARG002
        self._check()

    def _check(self) -> None:
        """Read the records, and in the next call put their limits into force. No resize comes in between."""
        if self.node.checking is None:
            targets = (Target(p, c) for p in self.agent.pods.all() for c in "ab" if (p.pod.uid, c) in self.node.running)
            self.node.checking = [(t.key, t.limited_shares[0].memory) for t in targets if t.limited_shares]
            return
        for key, limit in self.node.checking:
            self.node.limit(key, limit)
        self.node.checking = None

    def containers_start_again(self, r: Random) -> None:
        name = r.choice(NAMES)
        self._start(name)
        if r.random() < 0.5:
            self._run(name)

    def containers_run(self, r: Random) -> None:
        self._run(r.choice(NAMES))

    def _start(self, name: str) -> None:
        """PreStartContainer reads the record of which the agent knows. The containers run later."""
        gpu_pod = next((p for p in self.agent.pods.all() if p.pod.name == name), None)
        if gpu_pod is None or self._uid(name) != gpu_pod.pod.uid:
            return
        for share in gpu_pod.limited_shares or ():
            found = self.node.running.setdefault((gpu_pod.pod.uid, share.container), Running(None))
            found.limit, found.use, found.next = None, 0, share.memory

    def _run(self, name: str) -> None:
        mine = [(key, found) for key, found in self.node.running.items() if key[0] == self._uid(name)]
        for _, found in mine:
            found.limit = found.next if found.limit is None else found.limit
        if mine:
            rows = [{"name": key[1], "containerID": "x", "state": {"running": {}}} for key, _ in sorted(mine)]
            self.api.edit_pod(name, lambda raw: raw["status"].update(containerStatuses=rows))

    def programs_use_memory(self, r: Random) -> None:
        name, part = r.choice(NAMES), r.random()
        for (uid, _), found in self.node.running.items():
            if uid == self._uid(name) and found.limit is not None:
                found.use = int(part * found.limit)

    def _uid(self, name: str) -> str | None:
        raw = self.api.pods.get(("default", name))
        return raw["metadata"]["uid"] if raw else None

    # What must hold

    def _held(self) -> dict[Key, int]:
        """What the records in the API say that the containers hold."""
        found: dict[Key, int] = {}
        for raw in self._bound():
            gpu_pod = read_gpu_pod(raw, SETTINGS)
            assert gpu_pod is not None
            found |= {(gpu_pod.pod.uid, share.container): share.memory for share in recorded_shares(gpu_pod) or ()}
        return found

    def _no_limit_is_above_what_the_ledger_holds(self) -> None:
        held = self._held()
        for key, found in self.node.running.items():
            assert (found.limit or 0) <= held[key], key
        assert sum(held.values()) <= CARDS[0].memory

    def _ledger_of_the_leader_holds_all_limits_of_the_pods_that_it_has_seen(self) -> None:
        ledger = {(h.uid, s.container): s.memory for h in self.leader.state.holdings() for s in h.shares}
        for key, found in self.node.running.items():
            assert key not in ledger or (found.limit or 0) <= ledger[key], key

    def end(self) -> None:
        """In the end everybody has what is wanted, unless it was refused."""
        self.node.checking = None
        for found in self.node.running.values():
            found.limit = found.next if found.limit is None else found.limit
            found.use = 0
        for name in "pqr":
            self._run(name)
        for _ in range(30):
            self._settle()
        self._check()
        self._check()
        self.agent.close()
        held = self._held()
        ledger = {(h.uid, s.container): s.memory for h in self.leader.state.holdings() for s in h.shares if h.bound}
        assert ledger == held
        for raw in self._bound():
            self._check_resized(raw, held)

    def _settle(self) -> None:
        self.clock.now += 100
        self.leader.settle()
        self._deliver_to_agent(1000)
        self.agent.step()
        while self.agent.work is not None:
            self.agent.step()
        while self.agent.writes:
            self._write_of_the_agent_arrives()

    def _check_resized(self, raw: Raw, held: dict[Key, int]) -> None:
        meta = raw["metadata"]
        wanted = dict(part.split("=") for part in meta["annotations"].get(RESIZE, "").split(",") if part)
        found = read_sizes(meta["annotations"])
        if APPLIED in meta["annotations"]:
            assert read_applied(meta["annotations"]).serial == found.serial
        is_refused = (meta["name"], REASON) in [event[:2] for replica in self.replicas for event in replica.events]
        for container, size in found.containers.items():
            key = (meta["uid"], container)
            assert size.limit == size.held == held[key]
            if key in self.node.running and self.node.running[key].limit is not None:
                assert self.node.running[key].limit == size.limit
        for container, text in wanted.items():
            key = (meta["uid"], container)
            if key in self.node.running:
                assert is_refused or held[key] == int(text.removesuffix("Gi")) * GIB, (key, text)

    def check(self) -> None:
        self._no_limit_is_above_what_the_ledger_holds()
        self._ledger_of_the_leader_holds_all_limits_of_the_pods_that_it_has_seen()


WEIGHTS = {
    Cluster.a_user_resizes: 6,
    Cluster.a_pod_is_bound: 1,
    Cluster.a_pod_is_evicted_or_preempted: 1,
    Cluster.everybody_catches_up: 2,
    Cluster.a_scheduler_acts: 12,
    Cluster.a_late_write_arrives: 2,
    Cluster.another_replica_leads: 2,
    Cluster.the_agent_acts: 12,
    Cluster.the_agent_restarts: 1,
    Cluster.the_driver_is_checked: 4,
    Cluster.containers_start_again: 2,
    Cluster.containers_run: 2,
    Cluster.programs_use_memory: 4,
}
EVENTS = [event for event, weight in WEIGHTS.items() for _ in range(weight)]


@examples(30)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1 << 30)), min_size=60, max_size=80))
def test_no_container_uses_memory_that_another_pod_was_given(events: list[tuple[Event, int]]) -> None:
    cluster = Cluster()
    for event, seed in events:
        event(cluster, Random(seed))
        cluster.check()
    cluster.end()
