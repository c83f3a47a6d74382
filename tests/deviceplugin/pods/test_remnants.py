"""Pods that were deleted, or that the API calls ended, while their containers run: they keep their cards."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.gpu_pod import MIRROR
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import Receipt, Receipts, merge_by_card
from deviceplugin.pods.remnants import LONGEST_SECONDS, Remnants
from mgpu.model.device_checkpoints import UNLISTED_PODS, read_entries, shares_by_pod
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Minor, Share
from mgpu.model.pods import Stage
from mgpu.settings import load_settings
from tests.builders import cards, share
from tests.deviceplugin.cri import serving
from tests.deviceplugin.node import DEVICES, PODS, Node
from tests.waiting import until

ASSUMED, RECORD = "vke.volcengine.com/assumed", "vke.volcengine.com/gpu-index-container-"


def decided(name: str, card: str = "0", core: int = 60, **more: Any) -> dict[str, Any]:
    return share(name, node="n1", core=core, annotations={ASSUMED: "true", RECORD + "c": card}, **more)


def delete_by_force(node: Node, name: str) -> None:
    node.api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def told(node: Node) -> dict[str, Any]:
    """What the Device tells the scheduler, by the UID of the pod."""
    given = shares_by_pod(read_entries(node.api.get(f"{DEVICES}/n1")))
    return {uid: shares for uid, shares in given.items() if uid != UNLISTED_PODS}


def uid_of(node: Node, name: str) -> str:
    return str(node.pod(name)["metadata"]["uid"])


@pytest.mark.usefixtures("brief")
def test_remnant_holds_its_cards_until_the_runtime_reports_its_end(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        node.create(decided("hidden"))
        node.runs("hidden")
        cri.running.add(uid := uid_of(node, "hidden"))
        delete_by_force(node, "hidden")
        node.create(decided("p"))
        why = until(lambda: node.waits("p"))
        assert "card 0 (GPU-n1-0): containers of a deleted pod still run there" in why
        assert "hidden" not in why
        until(lambda: uid in told(node))
        node.create(decided("other", "1"))
        node.runs("other")
        cri.running.clear()
        node.runs("p")
        until(lambda: not told(node))
        until(lambda: len(node.cdi_files()) == 2)
        assert not list((node.folder / "cdi").glob(f"*{uid}*"))


@pytest.mark.usefixtures("brief")
def test_share_that_a_remnant_does_not_hold_is_given_out(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        node.create(decided("hidden", core=40))
        node.runs("hidden")
        cri.running.add(uid := uid_of(node, "hidden"))
        delete_by_force(node, "hidden")
        node.create(decided("p", core=60))
        node.runs("p")
        (held,) = until(lambda: told(node).get(uid))
        assert (held.card, held.core, held.whole) == ("GPU-n1-0", 400, False)
        node.create(decided("q", core=10))
        assert "containers of a deleted pod" in until(lambda: node.waits("q"))


@pytest.mark.usefixtures("brief")
def test_pod_deleted_while_no_agent_ran_holds_its_cards(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri:
        with node.agent():
            node.create(decided("hidden"))
            node.runs("hidden")
            cri.running.add(uid := uid_of(node, "hidden"))
        delete_by_force(node, "hidden")
        with node.agent():
            node.create(decided("p"))
            assert "containers of a deleted pod" in until(lambda: node.waits("p"))
            until(lambda: uid in told(node))
            cri.running.clear()
            node.runs("p")


@pytest.mark.usefixtures("brief")
def test_pod_with_the_name_of_a_remnant_waits_for_its_end(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        node.create(decided("p"))
        node.runs("p")
        cri.running.add(uid_of(node, "p"))
        delete_by_force(node, "p")
        node.create(decided("p"))
        assert "containers of a deleted pod" in until(lambda: node.waits("p"))
        cri.running.clear()
        node.runs("p")


def test_usual_end_of_a_pod_does_not_write_the_device(node: Node) -> None:
    with serving(node.folder / "cri.sock"), node.agent():
        node.create(decided("p"))
        node.runs("p")
        before = node.api.get(f"{DEVICES}/n1")["metadata"]["resourceVersion"]
        node.api.delete(f"{PODS}/p")
        until(lambda: not node.cdi_files())
        node.create(decided("q"))
        node.runs("q")
        assert node.api.get(f"{DEVICES}/n1")["metadata"]["resourceVersion"] == before


class Runtime:
    """running: pods with containers. None: it does not answer."""

    def __init__(self) -> None:
        self.running: set[str] | None = None
        self.ready: set[str] = set()

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        if self.running is None:
            raise RetryLater("there is no container runtime")
        return uid in self.running or (sandbox and uid in self.ready)


class Place:
    """A node with the pod `p`, which runs on card 0. now: the time on the loop."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.folder, self.now, self.runtime = folder, 0.0, Runtime()
        monkeypatch.setattr("deviceplugin.pods.remnants._now", lambda: self.now)
        self.raw = decided("p")
        self.raw["spec"] |= spec
        self.start()

    def start(self, *raws: dict[str, Any]) -> None:
        self.pods = NodePods(load_settings(), lambda: None)
        for raw in raws or (self.raw,):
            self.pods.take(raw)
        self.remnants = Remnants(Receipts(self.folder), self.pods, self.runtime, Wakeup())
        self.remnants.recover()
        known = self.pods.by_uid("uid-p")
        self.remnants.resume([(known, known.shares or ())] if known else [], cards(2))

    def holds(self) -> bool:
        asyncio.run(self.remnants.update())
        assert bool(self.remnants.holdings()) == bool(self.remnants.rows())
        return bool(self.remnants.rows())

    def status(self, phase: str, state: str) -> dict[str, Any]:
        rows = [{"name": "c", "containerID": "x", "state": {state: {}}}]
        return {**self.raw, "status": {"phase": phase, "containerStatuses": rows}}


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(folder, monkeypatch, terminationGracePeriodSeconds=600)


def test_without_a_runtime_a_deleted_pod_holds_its_cards_for_its_grace_period(place: Place) -> None:
    assert not place.holds()
    place.pods.drop(place.raw)
    assert place.holds()
    place.now = 599
    assert place.holds()
    place.now = 601
    assert not place.holds()


def test_without_a_runtime_the_longer_grace_period_of_a_deletion_counts(place: Place) -> None:
    deleting = {
        **place.status("Running", "running"),
        "metadata": {**place.raw["metadata"], "deletionGracePeriodSeconds": 900},
    }
    place.pods.take(deleting)
    place.pods.drop(deleting)
    place.holds()
    place.now = 899
    assert place.holds()


def test_without_a_runtime_no_pod_holds_its_cards_for_longer_than_the_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(folder, monkeypatch, terminationGracePeriodSeconds=1_000_000)
    place.pods.drop(place.raw)
    assert place.holds()
    place.now = LONGEST_SECONDS + 1
    assert not place.holds()


@pytest.mark.parametrize(("phase", "state"), [("Succeeded", "terminated"), ("Running", "terminated")])
def test_without_a_runtime_a_pod_whose_containers_had_ended_holds_nothing(place: Place, phase: str, state: str) -> None:
    place.pods.drop(place.status(phase, state))
    assert not place.holds()


def test_pod_with_a_final_phase_holds_its_cards_while_it_runs(place: Place) -> None:
    place.runtime.running = {"uid-p"}
    place.pods.take(place.status("Failed", "terminated"))
    assert place.holds()
    place.runtime.running, place.runtime.ready = set(), {"uid-p"}
    assert not place.holds()  # its sandbox goes a moment later, and it starts no container any more


def test_remnant_between_two_containers_holds_its_cards(place: Place) -> None:
    place.runtime.running, place.runtime.ready = set(), {"uid-p"}
    place.pods.drop(place.raw)
    assert place.holds()
    place.runtime.ready.clear()
    assert not place.holds()


def test_runtime_that_stops_answering_frees_nothing_before_the_grace_period(place: Place) -> None:
    place.runtime.running = {"uid-p"}
    place.pods.drop(place.raw)
    assert place.holds()
    place.runtime.running = None
    place.now = 500
    assert place.holds()


def test_static_pod_whose_mirror_is_created_again_is_no_remnant(place: Place) -> None:
    place.raw["metadata"]["annotations"][MIRROR] = "a" * 32
    Receipts(place.folder).remove("uid-p")
    place.start()
    place.runtime.running = {"a" * 32}
    place.pods.drop(place.raw)
    assert place.holds()
    again = {**place.raw, "metadata": {**place.raw["metadata"], "uid": "uid-q"}}
    place.pods.take(again)
    assert not place.holds()


def test_receipts_of_another_agent_are_taken_over_and_damaged_ones_ignored(folder: Path) -> None:
    shares = (Share("", "GPU-0", 500, 1 << 30, ratio=50), Share("c", Minor(1), stage=Stage.INIT, type="rdma"))
    Receipts(folder).write(receipt := Receipt("u", "k", 30, shares))
    (folder / "mgpu_v_receipt").write_text("{")
    no_card = {**asdict(shares[0]), "card": []}
    row = {"uid": "w", "kubelets_uid": "w", "grace": 30, "shares": [no_card]}
    (folder / "mgpu_w_receipt").write_text(json.dumps(row))
    receipts = Receipts(folder)
    receipts.read()
    assert receipts.all() == {"u": receipt}
    receipts.remove("u")
    assert sorted(file.name for file in folder.iterdir()) == ["mgpu_v_receipt", "mgpu_w_receipt"]


def test_receipt_has_one_share_for_each_card() -> None:
    containers = [Share(f"c{i}", 0, 100, 1 << 30, stage=Stage.INIT) for i in range(200)]
    one, other = merge_by_card([*containers, Share("app", 1, whole=True)], cards(2))
    assert (one.card, one.core, one.memory) == ("GPU-n1-0", 100, 1 << 30)
    assert (other.card, other.core, other.ratio) == ("GPU-n1-1", 1000, 100)
