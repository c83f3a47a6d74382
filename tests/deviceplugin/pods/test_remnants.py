"""Remnants: pods whose containers run after they have been deleted or marked as ended."""

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
from tests.builders import cards
from tests.deviceplugin import records
from tests.deviceplugin.cri import Cri, serving
from tests.deviceplugin.node import DEVICES, PODS, Node
from tests.waiting import until


def decided(name: str, card: str = "0", core: int = 60, **more: Any) -> dict[str, Any]:
    return records.decided(name, card, core, node="n1", **more)


def delete_by_force(node: Node, name: str) -> None:
    node.api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def reported(node: Node) -> dict[str, Any]:
    """Return pod UID → shares, as the Device reports them."""
    given = shares_by_pod(read_entries(node.api.get(f"{DEVICES}/n1")))
    return {uid: shares for uid, shares in given.items() if uid != UNLISTED_PODS}


def run(node: Node, cri: Cri, name: str, card: str = "0", core: int = 60) -> str:
    """Run a pod until the runtime of the test reports its container, and return its UID."""
    node.create(decided(name, card, core))
    cri.running.add(uid := str(node.runs(name)["metadata"]["uid"]))
    return uid


STATIC_UID = "a" * 32
STILL_RUNS = "containers of a deleted pod still run there"


@pytest.mark.usefixtures("brief")
def test_remnant_holds_its_cards_until_the_runtime_reports_its_end(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        uid = run(node, cri, "hidden")
        delete_by_force(node, "hidden")
        node.create(decided("p"))
        why = until(lambda: node.waits("p"))
        assert f"card 0 (GPU-n1-0): {STILL_RUNS}" in why
        assert "hidden" not in why
        until(lambda: uid in reported(node))
        node.create(decided("other", "1"))
        node.runs("other")
        cri.running.clear()
        node.runs("p")
        until(lambda: not reported(node))
        until(lambda: len(node.cdi_files()) == 2)
        assert not list((node.folder / "cdi").glob(f"*{uid}*"))


@pytest.mark.usefixtures("brief")
def test_remnant_holds_only_its_share(node: Node) -> None:
    with serving(node.folder / "cri.sock") as cri, node.agent():
        uid = run(node, cri, "hidden", core=40)
        delete_by_force(node, "hidden")
        node.create(decided("p", core=60))
        node.runs("p")
        (held,) = until(lambda: reported(node).get(uid))
        assert (held.card, held.core, held.whole) == ("GPU-n1-0", 400, False)
        node.create(decided("q", core=10))
        assert STILL_RUNS in until(lambda: node.waits("q"))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("name", ["p", "hidden"])
def test_pod_deleted_while_no_agent_runs_holds_its_cards(node: Node, name: str) -> None:
    """Also against a pod of the same name."""
    with serving(node.folder / "cri.sock") as cri:
        with node.agent():
            uid = run(node, cri, "hidden")
        delete_by_force(node, "hidden")
        with node.agent():
            node.create(decided(name))
            assert STILL_RUNS in until(lambda: node.waits(name))
            until(lambda: uid in reported(node))
            cri.running.clear()
            node.runs(name)


def test_ordinary_end_of_a_pod_does_not_write_the_device(node: Node) -> None:
    with serving(node.folder / "cri.sock"), node.agent():
        node.create(decided("p"))
        node.runs("p")
        before = node.api.get(f"{DEVICES}/n1")["metadata"]["resourceVersion"]
        node.api.delete(f"{PODS}/p")
        until(lambda: not node.cdi_files())
        node.create(decided("q"))
        node.runs("q")
        assert node.api.get(f"{DEVICES}/n1")["metadata"]["resourceVersion"] == before


class FakeRuntime:
    """A container runtime. It does not answer if `running` is None; `ready` has the pods with a ready sandbox."""

    def __init__(self) -> None:
        self.running: set[str] | None = None
        self.ready: set[str] = set()

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        if self.running is None:
            raise RetryLater("there is no container runtime")
        return uid in self.running or (sandbox and uid in self.ready)


class RunningPod:
    """The pod `p`, which runs on card 0, and the remnants of its node. `now` is the time on the loop."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.folder = folder
        self.now = 0.0
        self.runtime = FakeRuntime()
        monkeypatch.setattr("deviceplugin.pods.remnants._now", lambda: self.now)
        self.raw = decided("p")
        self.raw["spec"] |= spec
        self.start()

    def start(self) -> None:
        """Start an agent."""
        self.pods = NodePods(load_settings(), lambda: None)
        self.pods.take(self.raw)
        self.remnants = Remnants(Receipts(self.folder), self.pods, self.runtime, Wakeup())
        self.remnants.recover()
        (gpu_pod,) = self.pods.all()
        self.remnants.resume([(gpu_pod, gpu_pod.shares or ())], cards(2))

    def make_static(self) -> None:
        self.raw["metadata"]["annotations"][MIRROR] = STATIC_UID
        Receipts(self.folder).remove("uid-p")
        self.start()
        self.runtime.running = {STATIC_UID}

    def holds(self) -> bool:
        """Return whether the pod is a remnant."""
        asyncio.run(self.remnants.update())
        assert bool(self.remnants.holdings()) == bool(self.remnants.rows())
        return bool(self.remnants.rows())

    def status(self, phase: str, state: str) -> dict[str, Any]:
        rows = [{"name": "c", "containerID": "x", "state": {state: {}}}]
        return {**self.raw, "status": {"phase": phase, "containerStatuses": rows}}


@pytest.fixture
def running_pod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunningPod:
    return RunningPod(folder, monkeypatch, terminationGracePeriodSeconds=600)


@pytest.mark.parametrize(
    ("pod_grace", "deletion_grace", "seconds"),
    [(600, None, 600), (600, 900, 900), (1_000_000, None, LONGEST_SECONDS)],
    ids=["of the pod", "of the deletion", "longer than the limit"],
)
def test_without_a_runtime_a_remnant_holds_its_cards_for_its_grace_period(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pod_grace: int, deletion_grace: int | None, seconds: float
) -> None:
    running_pod = RunningPod(folder, monkeypatch, terminationGracePeriodSeconds=pod_grace)
    assert not running_pod.holds()
    deleting = running_pod.status("Running", "running")
    deleting["metadata"] = {**deleting["metadata"], "deletionGracePeriodSeconds": deletion_grace}
    running_pod.pods.take(deleting)
    running_pod.pods.drop(deleting)
    assert running_pod.holds()
    running_pod.now = seconds - 1
    assert running_pod.holds()
    running_pod.now = seconds + 1
    assert not running_pod.holds()


@pytest.mark.parametrize(("phase", "state"), [("Succeeded", "terminated"), ("Running", "terminated")])
def test_without_a_runtime_a_pod_with_ended_containers_holds_nothing(
    running_pod: RunningPod, phase: str, state: str
) -> None:
    running_pod.pods.drop(running_pod.status(phase, state))
    assert not running_pod.holds()


def test_pod_with_a_final_phase_holds_its_cards_while_it_runs(running_pod: RunningPod) -> None:
    running_pod.runtime.running = {"uid-p"}
    running_pod.pods.take(running_pod.status("Failed", "terminated"))
    assert running_pod.holds()
    running_pod.runtime.running, running_pod.runtime.ready = set(), {"uid-p"}
    assert not running_pod.holds()  # its sandbox starts no container any more


def test_remnant_between_two_containers_holds_its_cards(running_pod: RunningPod) -> None:
    running_pod.runtime.running, running_pod.runtime.ready = set(), {"uid-p"}
    running_pod.pods.drop(running_pod.raw)
    assert running_pod.holds()
    running_pod.runtime.ready.clear()
    assert not running_pod.holds()


def test_runtime_that_stops_answering_frees_nothing_before_the_grace_period(running_pod: RunningPod) -> None:
    running_pod.runtime.running = {"uid-p"}
    running_pod.pods.drop(running_pod.raw)
    assert running_pod.holds()
    running_pod.runtime.running = None
    running_pod.now = 500
    assert running_pod.holds()


def test_static_pod_whose_mirror_is_created_again_is_no_remnant(running_pod: RunningPod) -> None:
    running_pod.make_static()
    running_pod.pods.drop(running_pod.raw)
    assert running_pod.holds()
    again = {**running_pod.raw, "metadata": {**running_pod.raw["metadata"], "uid": "uid-q"}}
    running_pod.pods.take(again)
    assert not running_pod.holds()


def test_receipts_of_earlier_agents_are_read_and_damaged_ones_ignored(folder: Path) -> None:
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


def test_receipt_with_fields_of_a_later_version_is_read(folder: Path) -> None:
    receipt = Receipt("u", "k", 30, (Share("", "GPU-0", 500, 1 << 30),))
    row = {**asdict(receipt), "later": 1, "shares": [{**asdict(receipt.shares[0]), "later": 1}]}
    (folder / "mgpu_u_receipt").write_text(json.dumps(row))
    receipts = Receipts(folder)
    receipts.read()
    assert receipts.all() == {"u": receipt}


def test_receipt_has_one_share_for_each_card() -> None:
    containers = [Share(f"c{i}", 0, 100, 1 << 30, stage=Stage.INIT) for i in range(200)]
    share, whole = merge_by_card([*containers, Share("app", 1, whole=True)], cards(2))
    assert (share.card, share.core, share.memory) == ("GPU-n1-0", 100, 1 << 30)
    assert (whole.card, whole.core, whole.ratio) == ("GPU-n1-1", 1000, 100)
