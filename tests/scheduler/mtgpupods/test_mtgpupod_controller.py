"""The controller of MtgpuPods on the playground's API server, without its HTTP (tests/mtgpu_rig.py)."""

from collections.abc import Callable
from typing import Any

import pytest

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError
from tests.examples import SOAK
from tests.mtgpu_rig import DEVICES, GIB, ITEMS, PODS, Rig, items_path
from tests.scheduler.mtgpupods.rigged import bound, condition, names, own, pooled, refusing

Story = Callable[[Rig], object]


def test_the_pod_of_one_runs_on_the_card_of_its_gpuid(rig: Rig) -> None:
    rig.create("a", "zxcvb", "0.25", memory=20 * GIB)
    rig.settle()
    assert bound(rig, "a") == ("True", "Bound", "GPU-n1-0")
    pod, item = own(rig, "a"), rig.item("a")
    assert pod["spec"]["nodeName"] == "n1"
    env = {row["name"]: row["value"] for row in pod["spec"]["containers"][0]["env"]}
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["MGPU_CORE_PERCENT"]) == ("GPU-n1-0", "25")
    assert pod["metadata"]["ownerReferences"][0]["uid"] == item["metadata"]["uid"]
    assert item["metadata"]["finalizers"] == [mtgpu.FINALIZER]
    assert item["status"]["phase"] == "Running"
    assert item["status"]["PodStatus"]["phase"] == "Running"
    assert item["status"]["PodObjectMeta"]["uid"] == pod["metadata"]["uid"]
    assert item["status"]["observedGeneration"] == 1


def test_the_story_of_the_seed(rig: Rig) -> None:
    rig.create("pod1", "zxcvb", "0.2")
    rig.settle()
    rig.create("pod2", "qwert", "0.3")
    rig.settle()
    rig.create("pod3", "zxcvb", "0.4")
    rig.settle()
    cards = [bound(rig, f"pod{i}")[2] for i in (1, 2, 3)]
    assert cards[0] == cards[2] != cards[1]
    rig.delete("pod2")
    rig.settle()
    assert rig.occupy("qwert") is None
    rig.create("pod4", "asdfg", "0.5")
    rig.settle()
    assert bound(rig, "pod4") == ("True", "Bound", cards[1])


def test_shares_add_up_to_exactly_one_card(rig: Rig) -> None:
    for name, request in zip("abcd", ("0.2", "0.4", "0.3", "0.1"), strict=True):
        rig.create(name, "x", request)
    rig.create("e", "x", "0.001")
    rig.settle()
    assert [bound(rig, name)[0] for name in "abcde"] == ["True"] * 4 + ["False"]
    assert bound(rig, "e")[1] == "ResourceExceeded"


def test_who_waits_is_served_in_order_and_told_once(rig: Rig) -> None:
    for name, request in (("a", "0.9"), ("b", "0.5"), ("c", "0.1")):
        rig.create(name, "x", request)
        rig.settle()
    assert [bound(rig, name)[1] for name in "abc"] == ["Bound", "ResourceExceeded", "ResourceExceeded"]
    rig.delete("a")
    rig.settle()
    assert [bound(rig, name)[0] for name in "bc"] == ["True", "True"]
    told = [what.reason for name, what in rig.scheduler.told if name == "b" and what.type == "Bound"]
    assert told == ["ResourceExceeded", "Bound"]


def test_a_waiting_one_gets_the_card_that_a_pool_pod_leaves(rig: Rig) -> None:
    for i in range(2):
        rig.submit(pooled(f"p{i}"))
    rig.settle()
    rig.create("a", "x")
    rig.settle()
    assert bound(rig, "a")[1] == "ResourceExceeded"
    rig.kill(own(rig, "p1"), force=True)
    rig.settle()
    assert bound(rig, "a") == ("True", "Bound", "GPU-n1-1")


@pytest.mark.parametrize("node", ["n1", "s1"])
def test_a_card_is_kept_for_it_from_its_admission_on(rig: Rig, node: str) -> None:
    if node == "n1":
        rig.submit(pooled("there"))
        rig.settle()
    rig.create("a", "x", node=node)
    rig.scheduler.hear()
    rig.control()
    assert rig.occupy("x", node) is not None
    assert rig.bind(rig.submit(pooled("late", node=node)), node)
    rig.settle()
    assert bound(rig, "a")[0] == "True"


# Writes that go wrong.


def test_who_does_not_lead_writes_nothing(rig: Rig) -> None:
    rig.scheduler.leads = False
    rig.create("a", "x")
    before = rig.cluster.storage.rv
    rig.scheduler.hear()
    rig.control()
    assert rig.cluster.storage.rv == before
    rig.scheduler.leads = True
    rig.scheduler.controller.begin()
    rig.settle()
    assert bound(rig, "a")[0] == "True"


@pytest.mark.parametrize("what", ["bound", "ended"])
def test_one_whose_writes_are_refused_does_not_keep_other_gpuids_waiting(rig: Rig, what: str) -> None:
    refuse = ApiError(422, "Invalid", "a schema that became stricter")
    if what == "bound":
        rig.cluster.refuse = refusing("patch", "/mtgpupods/a/status", refuse)
        rig.create("a", "x")
    else:
        rig.create("a", "x")
        rig.settle()
        rig.cluster.refuse = refusing("delete", "/default/pods/a", refuse)
        rig.delete("a")
    rig.create("b", "y")
    rig.settle()
    assert bound(rig, "b")[0] == "True"
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert what == "ended" or bound(rig, "a")[0] == "True"
    assert names(rig, ITEMS) == (["b"] if what == "ended" else ["a", "b"])


def test_what_was_decided_in_an_earlier_term_is_not_written(rig: Rig) -> None:
    """A call takes so long that another replica leads meanwhile, and this one again."""
    rig.create("a", "x")
    rig.scheduler.hear()
    rig.cluster.refuse = lambda *_: rig.scheduler.controller.begin()
    rig.scheduler.controller.reconcile("n1")
    assert rig.item("a")["metadata"]["finalizers"] == [mtgpu.FINALIZER]
    assert "status" not in rig.item("a")
    assert rig.occupy("x") is None
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert bound(rig, "a")[0] == "True"


def test_one_that_may_not_be_written_does_not_keep_the_others_waiting(rig: Rig) -> None:
    rig.cluster.refuse = refusing("patch", "/mtgpupods/a", ApiError(403, "Forbidden", "a policy"))
    rig.create("a", "x")
    rig.create("b", "x")
    rig.settle()
    assert bound(rig, "a")[2] == ""
    assert bound(rig, "b")[0] == "True"


def test_finalizers_of_others_stay_where_there_are_many(rig: Rig) -> None:
    theirs = [f"test/{i}" for i in range(40)]
    rig.create("a", "x")
    rig.cluster.patch(f"{items_path('default')}/a", {"metadata": {"finalizers": theirs}})
    rig.settle()
    assert rig.item("a")["metadata"]["finalizers"] == [*theirs, mtgpu.FINALIZER]
    rig.delete("a")
    rig.settle()
    assert rig.item("a")["metadata"]["finalizers"] == theirs


def test_one_that_cannot_be_encoded_does_not_keep_the_others_waiting(rig: Rig) -> None:
    """Its spec was nested so deeply that the encoder refused its Pod, and with it all MtgpuPods of the node."""

    def refuse(verb: str, path: str) -> None:
        if verb == "patch" and path.endswith("/mtgpupods/a/status"):
            raise TypeError("Recursion limit reached")

    rig.cluster.refuse = refuse
    rig.create("a", "x")
    rig.create("b", "y")
    rig.settle()
    assert bound(rig, "a")[0] == ""
    assert bound(rig, "b")[0] == "True"


def test_what_the_watch_has_not_brought_yet_binds_nobody_to_another_card(rig: Rig) -> None:
    """One of two is bound when the API server is lost; then their occupy pod comes back on the other card."""
    rig.create("a", "x", node="s1")
    rig.create("b", "x", node="s1")
    rig.round()
    rig.scheduler.hear()
    rig.scheduler.wire.fail(1)
    rig.control()
    rig.scheduler.wire.fail(None)
    occupy = rig.occupy("x", "s1")
    assert occupy is not None
    assert [bound(rig, name)[2] for name in "ab"] == ["GPU-s1-0", ""]
    rig.nodes["s1"].takes = 1
    rig.kill(occupy, force=True)
    for _ in range(4):
        for resource in (DEVICES, PODS):
            rig.scheduler.hear(resource)
        rig.control()
        rig.schedule()
        rig.run("s1")
        rig.report("s1")
        rig.clock.now += 100
    assert list(rig.nodes["s1"].given.values()) == ["GPU-s1-1"]
    assert [bound(rig, name)[2] for name in "ab"] == ["GPU-s1-0", ""]
    rig.settle()
    assert [bound(rig, name)[2] for name in "ab"] == ["GPU-s1-0", ""]
    assert condition(rig, "a", "Degraded")["reason"] == "OtherCard"


def _start(rig: Rig) -> None:
    rig.create("a", "x", "0.5")
    rig.create("s", "x", "0.5", node="s1")


def _join(rig: Rig) -> None:
    _start(rig)
    rig.settle(1)
    rig.create("b", "x", "0.5")
    rig.create("c", "x", "0.5")


def _retire(rig: Rig) -> None:
    _join(rig)
    rig.settle(1)
    for name in "ab":
        rig.delete(name)
    rig.create("d", "y")


def _lose(rig: Rig) -> None:
    _start(rig)
    rig.settle(1)
    for gpuid, node in (("x", "n1"), ("x", "s1")):
        occupy = rig.occupy(gpuid, node)
        assert occupy is not None
        rig.end(occupy, "Failed")
    rig.kill(own(rig, "a"), force=True)


def _picture(rig: Rig) -> Any:
    """All but uids, times and versions."""
    items = [(raw["metadata"]["name"], *bound(rig, raw["metadata"]["name"])) for raw in rig.items()]
    pods = [
        (raw["metadata"]["name"], raw["status"]["phase"], raw["spec"].get("nodeName")) for raw in rig.cluster.all(PODS)
    ]
    return items, pods


@pytest.mark.parametrize("story", [_start, _join, _retire, _lose])
def test_a_crash_at_any_call_changes_nothing_in_the_end(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server is the same after a call and before the next, but for the last call of each turn.

    A normal run tries every second call of each story.
    """
    rig = Rig(("n1", 2, False), ("s1", 2, True))
    story(rig)
    rig.scheduler.wire.calls = 0
    control, last = rig.control, set[int]()

    def turn() -> None:
        control()
        last.add(rig.scheduler.wire.calls - 1)

    monkeypatch.setattr(rig, "control", turn)
    rig.settle()
    calls, wanted = rig.scheduler.wire.calls, _picture(rig)
    assert calls >= 5
    before = range(0, calls, 1 if SOAK else 2)
    for left, after in [*((i, False) for i in before), *((i, True) for i in sorted(last) if 0 <= i < calls)]:
        crashed = Rig(("n1", 2, False), ("s1", 2, True))
        story(crashed)
        crashed.scheduler.wire.fail(left, crash=True, after=after)
        crashed.settle()
        assert _picture(crashed) == wanted, f"{left} calls, after the next: {after}"
