"""Which plugin serves whole cards, and which cards another plugin gave out."""

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
    """The files and services from which `WholeCards` reads the state of a node."""

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


def test_node_without_another_plugin_is_served_by_mgpu(place: Place) -> None:
    assert place.look() == (None, ()), "neither the checkpoint nor the Node has been read"
    assert place.whole.not_served_reason()
    place.capacity = 0
    assert place.look()[0] == "mgpu"
    assert not place.whole.not_served_reason()
    place.capacity = 2
    assert place.look()[0] == "mgpu", "mgpu itself advertises them"


def test_restarted_agent_recognizes_its_own_ids(place: Place) -> None:
    place.capacity = 2
    place.write(ours("u", "0"), ids=list(device_ids(id_resources(cards(2), load_settings())[0], cards(2))))
    assert place.look() == ("mgpu", ())
    place.write(ours("u", "0"), ids=[])
    place.restart()
    assert place.look()[0] == "mgpu"


def test_claims_serve_whole_cards_if_the_setting_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path, "dra")
    place.capacity = 0
    assert place.look()[0] == "dra"
    assert "ResourceClaims" in (place.whole.not_served_reason() or "")
    assert place.whole.reason is None
    (tmp_path / "nvidia-gpu.sock").touch()
    assert place.look()[0] == "dra"
    assert place.whole.reason == "its socket nvidia-gpu.sock exists"


@pytest.mark.parametrize("setting", ["auto", "mgpu"])
@pytest.mark.parametrize("sign", ["socket", "devices", "a pod", "capacity"])
def test_signs_of_nvidias_plugin_make_it_the_server(tmp_path: Path, setting: str, sign: str) -> None:
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


def test_later_nvidia_plugin_serves_until_it_and_its_pods_are_gone(place: Place) -> None:
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


def test_setting_nvidia_overrides_what_is_found(tmp_path: Path) -> None:
    place = Place(tmp_path, "nvidia")
    place.capacity = 0
    place.write(ids=["0"])
    assert place.look()[0] == "nvidia"


def test_cards_given_out_by_nvidias_plugin_are_held_and_reported(place: Place) -> None:
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


def test_ended_pods_in_the_checkpoint_hold_nothing(place: Place) -> None:
    place.pods.take(whole("p"))
    place.write(theirs("uid-p", UUID), ids=[UUID])
    assert place.look()[1]
    place.pods.take(whole("p", phase="Failed"))
    assert place.look()[1] == ()


def test_pod_known_only_to_the_kubelet_counts_for_thirty_seconds(place: Place) -> None:
    place.write(theirs("uid-p", UUID), ids=[UUID])
    assert place.look()[1]
    assert place.look(seconds=20)[1]
    assert place.look(seconds=20)[1] == ()
    assert place.look()[1] == ()
    place.pods.take(whole("p"))
    assert place.look(seconds=20)[1], "the API server delivered it late"
    place.pods.drop(whole("p"))
    assert place.look()[1] == (), "it was present before, so it is gone"


def test_static_pod_is_found_by_the_kubelets_uid(place: Place) -> None:
    place.pods.take(whole("static", annotations={"kubernetes.io/config.mirror": "5d41402abc4b2a76"}))
    place.write(theirs("5d41402abc4b2a76", UUID), ids=[UUID])
    assert place.look(seconds=100)[1]
    assert place.look(seconds=100)[1]


@pytest.mark.parametrize("damage", ["half", "empty", "gone"])
def test_unreadable_checkpoint_keeps_the_last_state(place: Place, damage: str) -> None:
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


def test_pod_resources_is_queried_if_there_is_no_checkpoint(place: Place) -> None:
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
        # The pod requested one card: its image set the variable, and NVIDIA's container toolkit ignores that.
        (f"GPU-n1-0,{UUID}", None),
        ("all", None),
    ],
)
def test_unrecorded_pod_holds_the_cards_of_its_environment(
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
    assert place.asked == ["uid-p"], "an absent runtime is not queried all the time"
    assert not place.whole.bare
    place.environment["uid-p"] = visible
    assert place.look(seconds=10)[1] == (
        (CheckpointEntry("uid-p", "c", WHOLE_CARDS, ids),) if ids else (no_devices_entry("uid-p"),)
    )
    assert place.whole.bare == (frozenset() if ids else {"uid-p"})
    place.pods.take({**recorded(whole("p"), {"c": 0}), "status": RUNS})
    assert place.look(seconds=10)[1] == ()


def test_unrecorded_pod_in_the_checkpoint_is_not_looked_up_in_the_runtime(place: Place) -> None:
    place.pods.take({**whole("p"), "status": RUNS})
    place.write(theirs("uid-p", UUID), ids=[UUID])
    assert place.look()[1] == (CheckpointEntry("uid-p", "c", WHOLE_CARDS, (UUID,)),)
    assert not place.asked


def test_unrecorded_pod_with_a_share_holds_its_card(place: Place) -> None:
    place.pods.take({**pod("p", requesting("c", {"koordinator.sh/gpu-memory-ratio": 20})), "status": RUNS})
    place.write()
    place.environment["uid-p"] = UUID
    assert place.look() == ("mgpu", (CheckpointEntry("uid-p", "c", "koordinator.sh/gpu-memory-ratio", (UUID,)),))


def test_pod_with_an_invalid_record_holds_its_cards_and_is_no_sign_of_nvidias_plugin(place: Place) -> None:
    """After an upgrade, for example: mgpu gave the pod its cards, so mgpu must continue to serve whole cards."""
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


def test_agent_serves_whole_cards_by_allocation_records(node: Node) -> None:
    with node.agent():
        until(lambda: node.allocatable().get(WHOLE_CARDS) == "2")
        until(lambda: label(node) == "mgpu")
        node.create(recorded(whole("p", node="n1"), {"c": 1}))
        node.runs("p")
        assert node.visible("p") == UUID
        assert not listed(node)


def test_agent_leaves_whole_cards_to_nvidias_plugin_and_reports_its_cards(node: Node) -> None:
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
            # A share does not start there, even with a valid record.
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
            assert "has insufficient capacity" in until(lambda: node.waits("q"))
            node.api.delete(f"{PODS}/p")
            node.runs("q")
            until(lambda: not listed(node))
    finally:
        stock.stop()


def test_later_nvidia_plugin_keeps_its_registration(node: Node) -> None:
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


def test_agent_serves_whole_cards_again_after_nvidias_plugin_is_gone(node: Node) -> None:
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
