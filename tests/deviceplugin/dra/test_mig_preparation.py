"""MIG instances of claims are created only if they fit beside all that is delivered, whatever an allocation says."""

from dataclasses import replace
from pathlib import Path

import pytest

from deviceplugin.dra.claim_preparation import Surroundings
from deviceplugin.dra.mig_instances import MigInstances
from deviceplugin.dra.mig_ownership import MigOwnership
from deviceplugin.pods.identity import Refused
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig import Instance
from mgpu.model.mig_devices import MigDevice, share_of_instance
from tests.builders import card
from tests.deviceplugin.dra.claims import allocation, claim, claim_pod
from tests.deviceplugin.dra.rig import ClaimNode
from tests.deviceplugin.dra.test_mig_instances import FakeMig

TWO_AT_4 = Instance(4, "2g.20gb")
THREE_AT_4 = Instance(4, "3g.40gb")


class MigNode(ClaimNode):
    """The node `n1`, with one card in MIG mode."""

    def __init__(self, folder: Path) -> None:
        self.mig = FakeMig()
        super().__init__(folder)
        self.cards = (card(0),)
        self.partitioned = {0}

    def mig_cards(self) -> tuple[Card, ...]:
        return self.cards

    def _surroundings(self) -> Surroundings:
        ownership = MigOwnership(self.folder / "mig")
        self.instances = MigInstances(ownership, self.mig, self.claims, self.changed)
        self.instances.recover()
        return replace(super()._surroundings(), instances=self.instances)


@pytest.fixture
def node(tmp_path: Path) -> MigNode:
    return MigNode(tmp_path)


def given(node: MigNode, name: str, *devices: str, admin: bool = False) -> None:
    """Store an allocated claim with these devices, and the pod that uses it."""
    raw = claim(name, pods=(f"p-{name}",))
    results = [
        {"request": "gpu", "driver": "gpu.mgpu.io", "pool": "n1", "device": device, "adminAccess": admin}
        for device in devices
    ]
    raw["status"]["allocation"] = allocation(results)
    node.api.put(raw)
    node.take(claim_pod(f"p-{name}", claims=(name,)))


def refusal(node: MigNode, name: str) -> str:
    with pytest.raises(Refused) as error:
        node.prepare(name, seconds=0.0)
    return str(error.value)


def test_container_sees_the_instances_of_its_claim(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4", "card-0-mig-1g-10gb-0")
    env = node.env(node.prepare("a"))
    assert node.mig.instances.keys() == {TWO_AT_4, Instance(0, "1g.10gb")}
    assert sorted(env["NVIDIA_VISIBLE_DEVICES"].split(",")) == sorted(node.mig.instances.values())
    assert env["MGPU_CARDS"] == "0"


def test_claim_whose_own_instances_overlap_creates_none(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4", "card-0-mig-3g-40gb-4")
    assert "no room for 3g.40gb at 4 of card 0" in refusal(node, "a")
    assert node.mig.instances == {}
    assert node.record_files() == set()


def test_claim_with_one_instance_twice_creates_none(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4", "card-0-mig-2g-20gb-4")
    assert "no room for 2g.20gb at 4 of card 0" in refusal(node, "a")
    assert node.mig.instances == {}


def test_instance_for_administrative_access_is_refused(node: MigNode) -> None:
    """Such a claim holds nothing, so nothing would keep the instance from being destroyed under its containers."""
    given(node, "a", "card-0-mig-2g-20gb-4", admin=True)
    assert "administrative access" in refusal(node, "a")
    assert node.mig.instances == {}


@pytest.mark.parametrize(
    "share",
    [Share("c", 0, 300, 1 << 30), share_of_instance("c", MigDevice(0, THREE_AT_4)), Share("c", None, whole=True)],
    ids=["a share of the card", "an instance at the place", "an unknown card"],
)
def test_claim_waits_for_what_pods_hold_from_before_the_label(node: MigNode, share: Share) -> None:
    node.foreign = (Holding("u", "default", "other", "n1", "mgpu", (share,)),)
    given(node, "a", "card-0-mig-2g-20gb-4")
    assert "no room for 2g.20gb at 4" in refusal(node, "a")
    assert node.mig.instances == {}
    node.foreign = ()
    node.prepare("a")
    assert node.mig.instances.keys() == {TWO_AT_4}


def test_second_claim_for_a_place_waits_until_the_first_is_unprepared(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4")
    given(node, "b", "card-0-mig-3g-40gb-4")
    node.prepare("a")
    assert "no room" in refusal(node, "b")
    assert node.mig.instances.keys() == {TWO_AT_4}
    node.unprepare("a")
    node.prepare("b")
    assert node.mig.instances.keys() == {THREE_AT_4}


def test_delivered_claim_gets_its_instances_again_after_a_reboot(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4")
    before = node.env(node.prepare("a"))["NVIDIA_VISIBLE_DEVICES"]
    node.mig.instances.clear()
    node.restart()
    after = node.env(node.prepare("a"))["NVIDIA_VISIBLE_DEVICES"]
    assert after != before
    assert node.mig.instances == {TWO_AT_4: after}


def env_of_spec(node: MigNode, name: str) -> dict[str, str]:
    """Return the environment that a container gets which starts now."""
    record = node.claims.named("default", name)
    assert record is not None
    return node.env(record)


def restore(node: MigNode) -> None:
    node.run(node.instances.restore)


def test_container_that_restarts_after_a_reset_of_the_card_gets_the_instance_again(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4", "card-0-mig-1g-10gb-0")
    node.prepare("a")
    before = set(env_of_spec(node, "a")["NVIDIA_VISIBLE_DEVICES"].split(","))
    node.mig.instances.clear()
    restore(node)
    after = set(env_of_spec(node, "a")["NVIDIA_VISIBLE_DEVICES"].split(","))
    assert after == {*node.mig.instances.values()}
    assert len(after) == 2
    assert not after & before
    record = node.claims.named("default", "a")
    assert record is not None
    assert {device.card for device in record.devices} == after
    node.restart()
    assert set(env_of_spec(node, "a")["NVIDIA_VISIBLE_DEVICES"].split(",")) == after
    node.unprepare("a")
    node.run(node.instances.collect)
    assert node.mig.instances == {}


def test_instance_that_exists_is_not_created_again(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4")
    node.prepare("a")
    before = dict(node.mig.instances)
    files = node.spec("a")
    restore(node)
    assert node.mig.instances == before
    assert node.spec("a") == files


def test_lost_instance_waits_until_the_card_is_in_mig_mode_again(node: MigNode) -> None:
    """Cards of the generation Hopper and later lose their MIG mode when they are reset."""
    given(node, "a", "card-0-mig-2g-20gb-4")
    node.prepare("a")
    node.mig.instances.clear()
    node.mig.on = False
    restore(node)
    assert node.mig.instances == {}
    node.mig.on = True
    restore(node)
    assert node.mig.instances.keys() == {TWO_AT_4}


def test_lost_instance_does_not_replace_one_that_somebody_has_created_meanwhile(node: MigNode) -> None:
    given(node, "a", "card-0-mig-2g-20gb-4")
    node.prepare("a")
    node.mig.instances = {THREE_AT_4: "MIG-foreign"}
    restore(node)
    assert node.mig.instances == {THREE_AT_4: "MIG-foreign"}
