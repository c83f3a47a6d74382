"""Allocate and PreStartContainer, without gRPC."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deviceplugin.allocation import Allocations, Answer, Node
from deviceplugin.cdi import CdiFiles
from deviceplugin.identity import VOID, Refused
from deviceplugin.podresources import Owner
from deviceplugin.pods import GpuPod, NodePods
from deviceplugin.wakeup import Wakeup
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.settings import load_settings
from playground.cdi import Unresolvable, resolve
from playground.kubelet import checkpoint
from proto import deviceplugin_pb2 as api
from tests.builders import CORE, card, cards, container, pod, share

ASSUMED = "vke.volcengine.com/assumed"
RECORD = "vke.volcengine.com/gpu-index-container-"
T = TypeVar("T")
A, B = ["1", "2"], ["3", "4"]


def decided(name: str, on: str, **more: Any) -> dict[str, Any]:
    return share(name, core=2, annotations={ASSUMED: "true", RECORD + "c": on}, **more)


class Desk:
    """What the allocations of a node see: its pods, cards, and owners as the kubelet would name them."""

    def __init__(self, folder: Path, *, cdi: bool = True, wait_seconds: float = 5.0) -> None:
        self.folder = folder
        self.changed = Wakeup()
        self.pods = NodePods(load_settings(), self.changed.wake, lambda _: None)
        self.cards: tuple[Card, ...] = cards(2)
        self.owned: list[Owner] = []
        self.silent = 0
        self.refusals: list[tuple[str, str]] = []
        node = Node(
            pods=self.pods,
            cards=lambda: self.cards,
            owners=self,
            checkpoint=folder / "checkpoint",
            cdi=CdiFiles(folder / "cdi") if cdi else None,
            changed=self.changed,
            refused=self._refused,
        )
        self.of = Allocations(CORE, node, wait_seconds, guess_seconds=wait_seconds)

    def _refused(self, known: GpuPod, why: str) -> None:
        self.refusals.append((known.pod.name, why))

    async def owners(self, resource: str) -> list[Owner]:
        assert resource == CORE
        if self.silent:
            self.silent -= 1
            raise RetryLater("PodResources: RESOURCE_EXHAUSTED")
        return self.owned

    def owns(self, name: str, ids: list[str], container_name: str = "c") -> None:
        self.owned.append(Owner(container_name, frozenset(ids), "default", name))

    def visible(self, answer: Answer) -> str:
        return resolve(answer.cdi, self.folder / "cdi").env["NVIDIA_VISIBLE_DEVICES"]

    def allocate(self, ids: list[str], meanwhile: Callable[[], None] = lambda: None) -> Answer:
        return self._run(lambda: self.of.allocate(ids), meanwhile)

    def start(self, ids: list[str], meanwhile: Callable[[], None] = lambda: None) -> None:
        """PreStartContainer; `meanwhile` happens while it waits."""
        self._run(lambda: self.of.pre_start(ids), meanwhile)

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]], meanwhile: Callable[[], None]) -> T:
        async def run() -> T:
            self.changed.bind()
            asyncio.get_running_loop().call_soon(meanwhile)
            try:
                return await call()
            finally:
                self.changed.unbind()

        return asyncio.run(run())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_only_pod_that_can_be_meant_is_answered_at_once(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    answer = desk.allocate(A)
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert desk.allocate(A).env == VOID, "it is served: another call is for a pod that is not known yet"


def test_where_several_can_be_meant_or_none_is_decided_it_is_void(desk: Desk) -> None:
    assert desk.allocate(A).env == VOID
    desk.pods.take(share("late", core=2))
    assert desk.allocate(A).env == VOID
    desk.pods.take(decided("p", "1"))
    assert desk.allocate(A).env == VOID


def test_every_answer_names_a_fresh_device_that_does_not_exist_yet(desk: Desk) -> None:
    first, second = desk.allocate(A), desk.allocate(A)
    assert first.cdi != second.cdi
    with pytest.raises(Unresolvable):
        desk.visible(first)


def test_before_the_start_the_owner_of_the_ids_is_certain(desk: Desk) -> None:
    desk.pods.take(decided("p", "0"))
    desk.pods.take(decided("q", "1"))
    first, second = desk.allocate(A), desk.allocate(B)
    desk.owns("q", A)
    desk.owns("p", B)
    desk.start(list(reversed(A)))
    desk.start(B)
    assert (desk.visible(first), desk.visible(second)) == ("GPU-n1-1", "GPU-n1-0")


def test_a_kubelet_that_is_busy_is_asked_again(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    answer = desk.allocate(A)
    desk.owns("p", A)
    desk.silent = 2
    desk.start(A)
    assert desk.visible(answer) == "GPU-n1-1"


def test_the_pod_and_its_decision_are_waited_for(desk: Desk) -> None:
    answer = desk.allocate(A)
    desk.owns("p", A)

    def arrives() -> None:
        desk.pods.take(share("p", core=2))
        asyncio.get_running_loop().call_soon(desk.pods.take, decided("p", "1"))

    desk.start(A, arrives)
    assert desk.visible(answer) == "GPU-n1-1"


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([], "pod default/p is not known from the API server yet"),
        ([share("p", core=2)], "default/p: no cards have been decided for the pod"),
    ],
)
def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, pods: list[dict[str, Any]], why: str) -> None:
    desk = Desk(tmp_path, wait_seconds=0.05)
    for raw in pods:
        desk.pods.take(raw)
    desk.allocate(A)
    desk.owns("p", A)
    began = time.monotonic()
    with pytest.raises(Refused, match=why):
        desk.start(A)
    assert time.monotonic() - began < 5


def test_ids_that_nobody_owns_are_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_seconds=0.01)
    desk.owns("p", B)
    with pytest.raises(Refused, match="names no owner of 2 ids"):
        desk.start(A)


def test_a_wrong_record_is_refused_at_once_with_an_event(desk: Desk) -> None:
    desk.pods.take(decided("p", "7"))
    desk.owns("p", A)
    assert desk.allocate(A).env == VOID
    with pytest.raises(Refused, match="card 7, which this node has not"):
        desk.start(A)
    assert [name for name, _ in desk.refusals] == ["p"]
    assert not list((desk.folder).glob("cdi/*"))


def test_a_container_that_starts_again_gets_what_its_record_says_now(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    answer = desk.allocate(A)
    desk.owns("p", A)
    desk.start(A)
    desk.cards = (card(0), card(1, healthy=False))
    with pytest.raises(Refused, match="unhealthy"):
        desk.start(A)
    desk.cards = cards(2)
    desk.start(A)
    assert desk.visible(answer) == "GPU-n1-1"


def test_an_init_containers_ids_that_are_given_again_serve_both_in_turn(desk: Desk) -> None:
    two = pod(
        "p",
        container("c", 2, 512),
        init=(container("i", 2, 512),),
        annotations={ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "1"},
    )
    desk.pods.take(two)
    init, app = desk.allocate(A), desk.allocate(A)
    desk.owns("p", A)
    checkpoint.write(
        desk.folder / "checkpoint",
        [checkpoint.Entry("uid-p", name, CORE, tuple(A), b"") for name in ("i", "c")],
        {},
    )
    desk.start(A)
    assert desk.visible(init) == "GPU-n1-1"
    ended = {"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}
    desk.start(A, lambda: desk.pods.take({**two, "status": {"phase": "Pending", **ended}}))
    assert desk.visible(app) == "GPU-n1-0"


def test_after_a_restart_the_checkpoint_knows_the_device(tmp_path: Path) -> None:
    answer = Desk(tmp_path).allocate(A)
    response = api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name=answer.cdi[0])]).SerializeToString()
    checkpoint.write(tmp_path / "checkpoint", [checkpoint.Entry("uid-p", "c", CORE, tuple(A), response)], {})
    desk = Desk(tmp_path)
    desk.pods.take(decided("p", "1"))
    desk.start(A)
    assert desk.visible(answer) == "GPU-n1-1"


def test_after_a_restart_without_cdi_the_checkpoint_knows_the_cards(tmp_path: Path) -> None:
    before = Desk(tmp_path, cdi=False)
    before.pods.take(decided("p", "1"))
    response = api.ContainerAllocateResponse(envs=before.allocate(A).env).SerializeToString()
    checkpoint.write(tmp_path / "checkpoint", [checkpoint.Entry("uid-p", "c", CORE, tuple(A), response)], {})
    desk = Desk(tmp_path, cdi=False)
    desk.pods.take(decided("p", "1"))
    desk.start(A)
    desk.pods.take(decided("p", "0"))
    with pytest.raises(Refused, match="other cards were given"):
        desk.start(A)


def test_ids_that_went_to_another_pod_serve_only_that_one(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    old = desk.allocate(A)
    desk.owns("p", A)
    desk.start(A)
    desk.pods.take(decided("q", "0"))
    new = desk.allocate(A)
    desk.owned.clear()
    desk.owns("q", A)
    desk.start(A)
    assert (desk.visible(old), desk.visible(new)) == ("GPU-n1-1", "GPU-n1-0")


def test_without_cdi_the_oldest_decision_stands_and_a_wrong_guess_does_not_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path, cdi=False, wait_seconds=0.01)
    with pytest.raises(Refused, match="no pod on this node waits"):
        desk.allocate(A)
    for name, on, created in (("young", "1", "2026-01-02T00:00:00Z"), ("old", "0", "2026-01-01T00:00:00Z")):
        raw = decided(name, on)
        raw["metadata"]["creationTimestamp"] = created
        desk.pods.take(raw)
    first, second = desk.allocate(A), desk.allocate(B)
    assert [a.env["NVIDIA_VISIBLE_DEVICES"] for a in (first, second)] == ["GPU-n1-0", "GPU-n1-1"]
    assert not first.cdi
    desk.owns("young", A)
    desk.owns("old", B)
    with pytest.raises(Refused, match="other cards were given"):
        desk.start(A)
    desk.owned.clear()
    desk.owns("old", A)
    desk.start(A)


def test_without_cdi_a_pod_that_the_kubelet_saw_first_is_waited_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path, cdi=False)
    answer = desk.allocate(A, lambda: desk.pods.take(decided("p", "1")))
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"


def test_many_waits_do_not_hold_each_other_up(desk: Desk) -> None:
    """As when many pods were bound before their decisions."""
    names = [f"p{i}" for i in range(50)]
    ids = {name: [f"{name}-1", f"{name}-2"] for name in names}
    answers = {name: desk.allocate(ids[name]) for name in names}
    for name in names:
        desk.owns(name, ids[name])

    def decide() -> None:
        for i, name in enumerate(names):
            desk.pods.take(decided(name, str(i % 2)))

    async def run() -> None:
        desk.changed.bind()
        waiting = [desk.of.pre_start(ids[name]) for name in names]
        asyncio.get_running_loop().call_later(0.02, decide)
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert [desk.visible(answers[name]) for name in names] == [f"GPU-n1-{i % 2}" for i in range(50)]
