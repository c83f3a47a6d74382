"""Volcano's action `preempt` evicts pods by cards: as few as suffice, and none for a gang that does not fit."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from scheduler.api.volcano import VolcanoExtender, make_app
from tests import builders as b
from tests.scheduler.fake import Replica, admitted, cluster

TOKEN = "t" * 32
PENDING, PIPELINED, RUNNING, RELEASING = 1, 4, 32, 64
Raw = dict[str, Any]


def wanting(name: str, core: int) -> Raw:
    return b.pod(name, b.container("c", core, None if core == 100 else 1024))


class Preempting:
    """One action `preempt` on the node n1 (volcano.sh, pkg/scheduler/actions/preempt, `normalPreempt`)."""

    def __init__(self, cards: int) -> None:
        self.api = cluster(("n1", cards))
        self.replica = Replica(self.api)
        self.api.admit = admitted(self.replica)
        process: Any = self.replica
        self.client = Client(make_app(VolcanoExtender(process), TOKEN, 10))
        self.tasks: dict[str, Raw] = {}

    def run(self, *pods: tuple[str, int]) -> None:
        """Create pods of these shares in percent, one card after the other."""
        for name, core in pods:
            self.api.put("pods", wanting(name, core))
            self.replica.deliver()
            self.api.bind(name, "n1")
            self.replica.deliver()
            self.tasks[name] = self.task(name, RUNNING)

    def task(self, name: str, status: int) -> Raw:
        pod = self.api.pod(name)
        return {"UID": pod["metadata"]["uid"], "Name": name, "NodeName": "n1", "Status": status, "Pod": pod}

    def waits(self, name: str, core: int) -> Raw:
        self.api.put("pods", wanting(name, core))
        self.replica.deliver()
        return self.task(name, PENDING) | {"NodeName": ""}

    def call(self, verb: str, body: Raw) -> Any:
        return orjson.loads(self.client.post(f"/{TOKEN}/{verb}", json=body).data)

    def fits(self, task: Raw) -> bool:
        tasks = {other["UID"]: other for other in self.tasks.values()}
        return not self.call("predicate", {"task": task, "node": {"Name": "n1", "Tasks": tasks}})

    def preempt(self, *tasks: Raw, spared: Sequence[str] = ()) -> list[str] | None:
        """Evict tasks until a gang of tasks fits. Return the names of the evicted ones, or None if it does not fit."""
        before = dict(self.tasks)
        for task in tasks:
            self.fits(task)
            running = [t for n, t in self.tasks.items() if t["Status"] == RUNNING and n not in spared]
            victims = self.call("preemptable", {"evictor": task, "evictees": running})["victims"]
            fits = self.fits(task)
            for victim in victims if not fits else ():
                self.tasks[victim["Name"]] = victim | {"Status": RELEASING}
                fits = self.fits(task)
                if fits:
                    break
            if not fits:
                self.tasks = before
                return None
            self.tasks[task["Name"]] = task | {"Status": PIPELINED, "NodeName": "n1"}
        return sorted(name for name, task in self.tasks.items() if task["Status"] == RELEASING)


def test_pod_is_evicted_though_the_sum_of_the_free_shares_suffices() -> None:
    node = Preempting(3)
    node.run(("a", 60), ("b", 60), ("c", 60))
    evicted = node.preempt(node.waits("p", 60), spared=["a", "b"])
    assert evicted == ["c"]


def test_nobody_is_evicted_if_it_does_not_help() -> None:
    node = Preempting(2)
    node.run(("a", 60), ("b", 30), ("c", 60))
    assert node.preempt(node.waits("p", 100), spared=["a", "c"]) is None


def test_each_pod_of_a_gang_gets_cards_of_its_own() -> None:
    """One card is free already. It is for one of the pods only, and so is each card that becomes free."""
    node = Preempting(3)
    node.run(("a", 100), ("b", 60))
    gang = [node.waits(f"g{i}", 100) for i in range(3)]
    assert node.preempt(*gang) == ["a", "b"]
    node = Preempting(3)
    node.run(("a", 100), ("b", 60))
    gang = [node.waits(f"g{i}", 100) for i in range(4)]
    assert node.preempt(*gang) is None


def test_evictions_that_a_session_gave_up_do_not_count_in_the_next_one() -> None:
    node = Preempting(1)
    node.run(("a", 60))
    task = node.waits("p", 60)
    assert node.preempt(task) == ["a"]
    node.tasks = {"a": node.task("a", RUNNING)}
    assert not node.fits(task)


def test_cards_of_a_pod_that_is_being_deleted_are_allocated_once_it_has_ended() -> None:
    node = Preempting(1)
    node.run(("a", 60))
    node.api.edit_pod("a", lambda pod: pod["metadata"].update(deletionTimestamp="2026-11-23T15:00:00Z"))
    node.replica.deliver()
    node.tasks = {"a": node.task("a", RELEASING)}
    task = node.waits("p", 60)
    assert not node.fits(task)
    node.tasks["other"] = node.waits("other", 10) | {"Status": PIPELINED, "NodeName": "n1"}
    assert not node.fits(task)


def test_nobody_is_evicted_beside_pods_whose_deletion_suffices() -> None:
    node = Preempting(2)
    node.run(("a", 60), ("b", 60))
    node.api.edit_pod("a", lambda pod: pod["metadata"].update(deletionTimestamp="2026-11-23T15:00:00Z"))
    node.replica.deliver()
    node.tasks["a"] = node.task("a", RELEASING)
    assert node.preempt(node.waits("p", 60)) is None


def test_promised_cards_are_given_to_no_other_pod_of_the_session() -> None:
    node = Preempting(2)
    node.run(("a", 60))
    node.tasks["coming"] = node.waits("coming", 100) | {"Status": PIPELINED, "NodeName": "n1"}
    assert not node.fits(node.waits("p", 60))
    assert node.fits(node.waits("q", 40))


def resources(core: float, memory: float = 0) -> Raw:
    return {"MilliCPU": 0, "Memory": 0, "ScalarResources": {b.CORE: core * 1000, b.MEMORY: memory * 1000}}


@pytest.mark.parametrize(("cards", "share", "idle", "count"), [(2, 50, 0, 2), (3, 40, 60, 0)])
def test_reclaim_has_victims_only_if_volcano_evicts_all_of_them(cards: int, share: int, idle: int, count: int) -> None:
    """Volcano stops once the sum is free: at 60 % free it evicts one pod of 40 %, although a card holds two of them."""
    node = Preempting(cards)
    node.run(*((f"p{i}", share) for i in range(2 * cards)))
    evictees = [task | {"Resreq": resources(share, 1024)} for task in node.tasks.values()]
    task = node.waits("whole", 100) | {"InitResreq": resources(100)}
    nothing = resources(0)
    seen = {"Name": "n1", "Tasks": node.tasks, "Idle": resources(idle), "Releasing": nothing, "Pipelined": nothing}
    assert node.call("predicate", {"task": task, "node": seen})["code"] == 2
    body = {"evictor": task, "evictees": evictees}
    assert len(node.call("reclaimable", body)["victims"]) == count
    assert len(node.call("preemptable", body)["victims"]) == 2


@pytest.mark.parametrize("tasks", [None, {}, {"x": 1}, {"x": {"Status": RELEASING}}])
def test_malformed_tasks_of_a_node_are_no_evictions(tasks: object) -> None:
    node = Preempting(1)
    node.run(("a", 60))
    reply = node.call("predicate", {"task": node.waits("p", 60), "node": {"Name": "n1", "Tasks": tasks}})
    assert reply["code"] in (1, 2)
