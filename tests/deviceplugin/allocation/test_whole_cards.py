"""Who serves whole cards, and what another plugin gave out."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deviceplugin.allocation.whole_cards import WholeCards
from deviceplugin.inventory.offers import WHOLE_CARDS, id_resources
from deviceplugin.kubelet.device_ids import device_ids
from deviceplugin.kubelet.pod_resources import Owner
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.pods.capacity_check import Grants
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.device_checkpoints import CHECKPOINTS, UNLISTED_PODS, CheckpointEntry, no_devices_entry
from mgpu.model.errors import RetryLater
from mgpu.model.record_seals import Keys, key_id
from mgpu.settings import load_settings
from playground.kubelet import device_checkpoint
from playground.nvidia_device_plugin import NvidiaPlugin
from proto import deviceplugin_pb2 as api
from tests.builders import cards, pod, share
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.records import recorded, requesting
from tests.waiting import until

UUID = "GPU-n1-1"
LABEL = "mgpu.io/whole-cards"


def theirs(uid: str, *ids: str) -> device_checkpoint.Entry:
    answer = api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(ids)})
    return device_checkpoint.Entry(uid, "c", WHOLE_CARDS, ids, answer.SerializeToString())


def ours(uid: str, *ids: str) -> device_checkpoint.Entry:
    answer = api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name="mgpu.io/card=n")])
    return device_checkpoint.Entry(uid, "c", WHOLE_CARDS, ids, answer.SerializeToString())


def whole(name: str, **more: Any) -> dict[str, Any]:
    return pod(name, requesting("c", {WHOLE_CARDS: 1}), **more)


class Place:
    """A node whose whole cards are looked at."""

    def __init__(self, folder: Path, setting: str = "auto") -> None:
        self.folder, self.owned = folder, list[Owner]()
        self.capacity: int | None = None
        self.pods = NodePods(load_settings(), lambda: None)
        self.now, self.silent = 0.0, False
        self.environment: dict[str, str] = {}
        self.asked: list[str] = []
        self.setting = setting
        self.restart()

    def restart(self) -> None:
        unrecorded = UnrecordedPods(self, self.pods, FixedGpus(cards(2)), Grants({}), NodePartitions(enabled=False))
        self.whole = WholeCards(self.setting, self.folder, self.pods, self, unrecorded, lambda: self.capacity)

    def write(self, *entries: device_checkpoint.Entry, **offered: list[str]) -> None:
        registered = {"r": ["0"]} | ({WHOLE_CARDS: offered["ids"]} if offered else {})
        device_checkpoint.write(self.folder / device_checkpoint.FILE, entries, registered)

    async def environments(self, uid: str) -> dict[str, Mapping[str, str]]:
        self.asked.append(uid)
        if uid not in self.environment:
            raise RetryLater("no container runtime")
        return {"c": {"A": "B", "NVIDIA_VISIBLE_DEVICES": self.environment[uid]}, "other": {}}

    async def owners(self, resource: str) -> list[Owner]:
        assert resource == WHOLE_CARDS
        if self.silent:
            raise RetryLater("PodResources: UNAVAILABLE")
        return self.owned

    def look(self, *, synced: bool = True, seconds: float = 0.0) -> tuple[str | None, Any]:
        self.now += seconds
        loop = asyncio.new_event_loop()
        loop.time = lambda: self.now  # type: ignore[method-assign]
        try:
            loop.run_until_complete(self.whole.update(synced=synced))
        finally:
            loop.close()
        *rows, others = self.whole.unrecorded_rows or (no_devices_entry(UNLISTED_PODS),)
        assert others == no_devices_entry(UNLISTED_PODS), "pods that are not listed have nothing"
        return self.whole.server, None if self.whole.unrecorded_rows is None else tuple(rows)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_on_a_node_without_another_plugin_they_are_ours(place: Place) -> None:
    assert place.look() == (None, ()), "neither the kubelet nor the API server has said anything"
    assert place.whole.not_served_reason()
    place.capacity = 0
    assert place.look()[0] == "mgpu"
    assert not place.whole.not_served_reason()
    place.capacity = 2
    assert place.look()[0] == "mgpu", "it is ours"


def test_what_this_agent_offered_before_it_was_restarted_is_ours(place: Place) -> None:
    place.capacity = 2
    place.write(ours("u", "0"), ids=list(device_ids(id_resources(cards(2), load_settings())[0], cards(2))))
    assert place.look() == ("mgpu", ())
    place.write(ours("u", "0"), ids=[])
    place.restart()
    assert place.look()[0] == "mgpu"


@pytest.mark.parametrize("setting", ["auto", "mgpu"])
@pytest.mark.parametrize("sign", ["socket", "devices", "a pod", "capacity"])
def test_whoever_shows_signs_of_serving_them_is_left_alone(tmp_path: Path, setting: str, sign: str) -> None:
    place = Place(tmp_path, setting)
    place.capacity = 0
    place.pods.take(whole("p"))
    if sign == "socket":
        (tmp_path / "nvidia-gpu.sock").touch()
    elif sign == "devices":
        place.write(ids=["GPU-n1-0", UUID])
    elif sign == "a pod":
        place.write(theirs("uid-p", UUID))
    else:
        place.write()
        place.capacity = 2
    assert place.look()[0] == "nvidia"
    assert "NVIDIA's plugin serves" in str(place.whole.not_served_reason())


def test_a_plugin_that_comes_later_takes_over_and_when_it_has_gone_and_its_pods_too_they_are_ours(place: Place) -> None:
    place.capacity = 2
    place.write(ids=["0", "1"])
    assert place.look()[0] == "mgpu"
    place.pods.take(whole("p"))
    place.write(theirs("uid-p", UUID), ids=["GPU-n1-0", UUID])
    assert place.look()[0] == "nvidia"
    place.write(theirs("uid-p", UUID))
    place.capacity = 0
    assert place.look()[0] == "nvidia", "its pod still runs"
    place.pods.take(whole("p", phase="Succeeded"))
    assert place.look() == ("mgpu", ())


def test_where_it_is_set_nothing_is_looked_for(tmp_path: Path) -> None:
    place = Place(tmp_path, "nvidia")
    place.capacity = 0
    place.write(ids=["0"])
    assert place.look()[0] == "nvidia"


def test_what_it_gave_out_is_told_but_not_what_mgpu_placed(place: Place) -> None:
    for raw in (whole("p"), whole("ours"), recorded(whole("recorded"), {"c": 0}), pod("none")):
        place.pods.take(raw)
    entries = [theirs("uid-p", "GPU-n1-1::3"), ours("uid-ours", "0"), theirs("uid-recorded", "GPU-n1-0")]
    place.write(*entries, theirs("uid-none", "GPU-n1-0"), ids=["GPU-n1-0", UUID])
    assert place.look(synced=False)[1] is None
    _, given = place.look()
    assert given == (
        CheckpointEntry("uid-none", "c", WHOLE_CARDS, ("GPU-n1-0",)),
        CheckpointEntry("uid-p", "c", WHOLE_CARDS, ("GPU-n1-1::3",)),
    )
    held = place.whole.holdings()
    assert [(h.key, [c.index for c in cards(2) if h.uses(c).core]) for h in held] == [
        ("default/none", [0]),
        ("default/p", [1]),
        ("default/recorded", [0]),
    ], "by whatever record, that plugin gave it this card"


def test_pods_that_ended_hold_nothing_though_the_checkpoint_still_has_them(place: Place) -> None:
    place.pods.take(whole("p"))
    place.write(theirs("uid-p", UUID), ids=[UUID])
    assert place.look()[1]
    place.pods.take(whole("p", phase="Failed"))
    assert place.look()[1] == ()


def test_a_pod_that_only_the_kubelet_knows_counts_for_a_while(place: Place) -> None:
    place.write(theirs("uid-p", UUID), ids=[UUID])
    assert place.look()[1]
    assert place.look(seconds=20)[1]
    assert place.look(seconds=20)[1] == ()
    assert place.look()[1] == ()
    place.pods.take(whole("p"))
    assert place.look(seconds=20)[1], "the API server was late"
    place.pods.drop(whole("p"))
    assert place.look()[1] == (), "it was known, and has gone"


def test_a_static_pod_is_known_by_the_kubelets_uid(place: Place) -> None:
    place.pods.take(whole("static", annotations={"kubernetes.io/config.mirror": "5d41402abc4b2a76"}))
    place.write(theirs("5d41402abc4b2a76", UUID), ids=[UUID])
    assert place.look(seconds=100)[1]
    assert place.look(seconds=100)[1]


@pytest.mark.parametrize("damage", ["half", "empty", "gone"])
def test_a_checkpoint_that_cannot_be_read_takes_nothing_away(place: Place, damage: str) -> None:
    place.pods.take(whole("p"))
    place.write(theirs("uid-p", UUID), ids=[UUID])
    before = place.look()
    file = place.folder / device_checkpoint.FILE
    text = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(text[: len(text) // 2] if damage == "half" else b"")
    assert place.look() == before
    place.write(ids=[UUID])
    assert place.look()[1] == ()


def test_where_there_is_no_checkpoint_the_kubelet_is_asked(place: Place) -> None:
    place.pods.take(whole("p"))
    place.silent = True
    assert place.look()[1] is None
    place.silent = False
    place.owned = [
        Owner("default", "p", "c", frozenset({UUID})),
        Owner("default", "ours", "c", frozenset({"0"})),
        Owner("default", "unknown", "c", frozenset({"GPU-n1-0"})),
    ]
    assert place.look()[1] == (CheckpointEntry("uid-p", "c", WHOLE_CARDS, (UUID,)),)


RUNS = {"phase": "Running", "containerStatuses": [{"name": "c", "containerID": "x", "state": {"running": {}}}]}


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (UUID, (UUID,)),
        ("1", (UUID,)),
        ("minor:1", (UUID,)),
        ("void", None),
        ("GPU-elsewhere", None),
        # It asked for one: the variable is its image's own, and the container toolkit heeds it of no container.
        (f"GPU-n1-0,{UUID}", None),
        ("all", None),
    ],
)
def test_a_pod_that_runs_without_a_record_and_is_in_no_checkpoint_shows_its_cards(
    place: Place, visible: str, ids: tuple[str, ...] | None
) -> None:
    place.pods.take(whole("p"))
    place.write()
    assert place.look()[1] == ()
    assert not place.asked, "it does not run yet"
    place.pods.take({**whole("p"), "status": RUNS})
    anything = (CheckpointEntry("uid-p", "c", WHOLE_CARDS, ("GPU-n1-0", UUID)),)
    assert place.look()[1] == anything
    assert place.look(seconds=1)[1] == anything
    assert place.asked == ["uid-p"], "a runtime that is not there is not asked all the time"
    assert not place.whole.bare
    place.environment["uid-p"] = visible
    assert place.look(seconds=10)[1] == (
        (CheckpointEntry("uid-p", "c", WHOLE_CARDS, ids),) if ids else (no_devices_entry("uid-p"),)
    )
    assert place.whole.bare == (frozenset() if ids else {"uid-p"})
    place.pods.take({**recorded(whole("p"), {"c": 0}), "status": RUNS})
    assert place.look(seconds=10)[1] == ()


def test_what_the_checkpoint_knows_is_asked_of_nobody_else(place: Place) -> None:
    place.pods.take({**whole("p"), "status": RUNS})
    place.write(theirs("uid-p", UUID), ids=[UUID])
    assert place.look()[1] == (CheckpointEntry("uid-p", "c", WHOLE_CARDS, (UUID,)),)
    assert not place.asked


def test_a_share_that_runs_without_a_record_is_held_too(place: Place) -> None:
    place.pods.take({**pod("p", requesting("c", {"koordinator.sh/gpu-memory-ratio": 20})), "status": RUNS})
    place.write()
    place.environment["uid-p"] = UUID
    assert place.look() == ("mgpu", (CheckpointEntry("uid-p", "c", "koordinator.sh/gpu-memory-ratio", (UUID,)),))


def test_pod_whose_record_does_not_count_holds_its_cards_and_shows_no_other_plugin(place: Place) -> None:
    """mgpu's own, after an upgrade for instance: whole cards must not be given up for it."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key()
    records = RecordVerifier(Keys("2026-01-01T00:00:00Z", {key_id(key): key}))
    place.pods = NodePods(load_settings(), lambda: None, records)
    place.restart()
    place.pods.take({**recorded(whole("p", node="n1"), {"c": 0}), "status": RUNS})
    place.write(ours("uid-p", "0"), ids=["0", "1"])
    place.environment["uid-p"] = "GPU-n1-0"
    assert place.look() == ("mgpu", (CheckpointEntry("uid-p", "c", WHOLE_CARDS, ("GPU-n1-0",)),))


def listed(node: Node) -> list[dict[str, Any]]:
    annotations = (node.device() or {"metadata": {}})["metadata"].get("annotations") or {}
    found: list[dict[str, Any]] = json.loads(annotations.get(CHECKPOINTS, "[]"))
    return [row for row in found if row["podUID"] != UNLISTED_PODS]


def label(node: Node) -> str:
    return str(node.api.get("/api/v1/nodes/n1")["metadata"]["labels"].get(LABEL, ""))


def test_our_plugin_serves_whole_cards_from_the_same_ledger(node: Node) -> None:
    with node.agent():
        until(lambda: node.allocatable().get(WHOLE_CARDS) == "2")
        until(lambda: label(node) == "mgpu")
        node.create(recorded(whole("p", node="n1"), {"c": 1}))
        node.runs("p")
        assert node.visible("p") == UUID
        assert not listed(node)


def test_a_stock_plugin_is_left_alone_and_its_cards_are_told(node: Node) -> None:
    stock = NvidiaPlugin(node.folder / "device-plugins", ["GPU-n1-0", UUID])
    stock.start()
    until(lambda: node.allocatable().get(WHOLE_CARDS) == "2")
    try:
        with node.agent():
            until(lambda: label(node) == "nvidia")
            assert not (node.folder / "device-plugins" / "mgpu-gpu.sock").exists()
            node.create(whole("p", node="n1"))
            node.runs("p")
            (row,) = until(lambda: listed(node))
            assert (row["podUID"], row["resourceName"]) == (node.pod("p")["metadata"]["uid"], WHOLE_CARDS)
            (uuid,) = row["deviceIDs"]
            assert node.visible("p") == uuid
            # Whoever wrote its record, a share does not start there.
            index = int(uuid[-1])
            node.create(
                recorded(
                    pod(
                        "q",
                        requesting("c", {"koordinator.sh/gpu-core": 2, "koordinator.sh/gpu-memory-ratio": 2}),
                        node="n1",
                    ),
                    {"c": index},
                )
            )
            assert "has no room" in until(lambda: node.waits("q"))
            node.api.delete(f"{PODS}/p")
            node.runs("q")
            until(lambda: not listed(node))
    finally:
        stock.stop()


def test_a_stock_plugin_that_comes_later_keeps_what_it_registered(node: Node) -> None:
    stock = NvidiaPlugin(node.folder / "device-plugins", ["GPU-n1-0", UUID])
    with node.agent() as agent:
        until(lambda: label(node) == "mgpu")
        stock.start()
        try:
            until(lambda: label(node) == "nvidia")
            node.create(whole("p", node="n1"))
            node.runs("p")
            (row,) = until(lambda: listed(node))
            assert node.visible("p") == row["deviceIDs"][0]
            assert not agent.not_ready_reason()
        finally:
            stock.stop()


def test_when_a_stock_plugin_has_gone_they_are_ours_again(node: Node) -> None:
    stock = NvidiaPlugin(node.folder / "device-plugins", ["GPU-n1-0", UUID])
    with node.agent():
        until(lambda: label(node) == "mgpu")
        stock.start()
        until(lambda: label(node) == "nvidia")
        stock.stop()
        # The kubelet writes with an allocation that it has no such devices any more.
        node.create(recorded(share("q", node="n1"), {"c": 0}))
        until(lambda: label(node) == "mgpu")
        until(lambda: node.allocatable().get(WHOLE_CARDS) == "2")
        node.create(recorded(whole("p", node="n1"), {"c": 1}))
        node.runs("p")
        assert node.visible("p") == UUID
