"""What MtgpuPods and their occupy pods hold, and who finds their cards how."""

import copy
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.gpu_requests import Rejection
from mgpu.model.ledger import Holding
from mgpu.model.record_seals import Keys, Signer
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import MtgpuPodsAffected
from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.cluster.mtgpupod_holdings import MtgpuNode
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.filter import Filtered
from scheduler.decisions.preemption import Victims
from tests import builders as b
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster

Raw = dict[str, Any]
STOCK = {"mgpu.io/whole-cards": "nvidia"}
OWNER = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": "m", "uid": "uid-m", "controller": True}


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 3))


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    return Replica(api)


def given(replica: Replica, raw: Raw) -> Raw:
    kind = "mtgpupods" if raw["kind"] == "MtgpuPod" else "pods"
    replica.api.put(kind, raw)
    replica.deliver()
    return raw


def gone(replica: Replica, raw: Raw) -> None:
    kind = "mtgpupods" if raw["kind"] == "MtgpuPod" else "pods"
    replica.api.remove(kind, raw["metadata"]["name"], raw["metadata"]["namespace"])
    replica.deliver()


def own_pod(uid: str = "uid-own", card: str = "GPU-n1-1", *, orphan: bool = False, **more: Any) -> Raw:
    """The Pod of MtgpuPod m."""
    said = b.mtgpupod()["metadata"]["annotations"]
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": card}]
    raw = b.pod("m", b.container(env=env), annotations=said, node="n1", uid=uid, **more)
    raw["metadata"]["ownerReferences"] = [] if orphan else [OWNER]
    return raw


def unbound(raw: Raw) -> Raw:
    del raw["spec"]["nodeName"]
    return raw


def said(replica: Replica) -> list[tuple[str, int, int]]:
    """Of each card: its GPUID, what is used of it and what is free for those who share without a name."""
    return [(s.gpuid, s.core_used, s.core_free) for s in replica.state.node_snapshot("n1", "").cards]


def decided(replica: Replica, raw: Raw) -> Reservation | Rejection:
    """With its reservation, as the Binding's admission does it."""
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    return replica.decider.decide(known, "n1")


def cards_of(found: Reservation | Rejection) -> list[int]:
    assert isinstance(found, Reservation), found
    return [index for _, chosen in found.placement.containers for index in chosen]


def admit(replica: Replica, *rows: tuple[str, str, object], version: int | None = None) -> bool:
    """(name, GPUID, card) of MtgpuPods that ask for 0.2."""
    held = []
    for name, gpuid, card in rows:
        given(replica, b.mtgpupod(name, gpuid))
        held.append(mtgpu.holding(mtgpu.read_mtgpupod(b.mtgpupod(name, gpuid)), card, bound=False))  # type: ignore[arg-type]
    return replica.state.mtgpupods.admit("n1", held, on(replica).version if version is None else version)


def mgpu_cards(replica: Replica) -> tuple[int, ...]:
    return replica.state.node_snapshot("n1", "").mgpu_cards


def on(replica: Replica) -> MtgpuNode:
    return replica.state.mtgpupods.snapshot("n1").node


def filtered(replica: Replica, raw: Raw) -> Filtered:
    known = replica.state.gpu_pod(raw["metadata"]["uid"])
    assert known is not None
    return replica.filter.filter(known, ["n1"])


FREE = ("", 0, 1000)


class TestBound:
    def test_it_holds_its_card_for_its_gpuid_alone(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        assert said(replica) == [FREE, ("zxcvb", 200, 0), FREE]
        assert [s.core_left for s in on(replica).cards] == [1000, 800, 1000]

    def test_it_holds_whatever_the_card_has(self, replica: Replica) -> None:
        for name in "abcdef":
            given(replica, b.mtgpupod(name, request="0.3", bound="GPU-n1-0"))
        assert said(replica)[0] == ("zxcvb", 1800, 0)

    def test_without_a_card_it_holds_nothing(self, replica: Replica) -> None:
        given(replica, b.mtgpupod())
        assert replica.state.holdings() == ()

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_one_that_has_ended_holds_only_while_its_pod_runs(self, replica: Replica, phase: str) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1", phase=phase))
        assert said(replica) == [FREE] * 3
        given(replica, own_pod(phase="Running"))
        assert said(replica)[1] == ("zxcvb", 200, 0)
        given(replica, own_pod(phase="Succeeded"))
        assert said(replica) == [FREE] * 3

    def test_what_its_pod_has_counts_behind_a_container_that_somebody_put_before_its_own(
        self, replica: Replica
    ) -> None:
        raw = own_pod(phase="Running")
        raw["spec"]["containers"].insert(0, b.container("mesh"))
        given(replica, raw)
        assert said(replica)[1] == ("zxcvb", 200, 0)

    def test_a_pod_that_lost_its_owner_is_known_by_the_status(self, replica: Replica) -> None:
        raw = b.mtgpupod(bound="GPU-n1-1", phase="Failed")
        raw["status"]["PodObjectMeta"] = {"uid": "uid-own"}
        given(replica, own_pod(phase="Running", orphan=True))
        assert said(replica) == [FREE] * 3
        given(replica, raw)
        assert said(replica)[1] == ("zxcvb", 200, 0)
        given(replica, own_pod(phase="Succeeded", orphan=True))
        assert said(replica) == [FREE] * 3

    def test_its_pod_holds_on_when_it_is_gone_itself(self, replica: Replica) -> None:
        raw, pod = given(replica, b.mtgpupod(bound="GPU-n1-1")), given(replica, own_pod(phase="Running"))
        gone(replica, raw)
        assert said(replica)[1] == ("zxcvb", 200, 0)
        gone(replica, pod)
        assert said(replica) == [FREE] * 3

    @pytest.mark.parametrize("says", [{}, b.mtgpupod()["metadata"]["annotations"]], ids=["nothing", "a share"])
    def test_a_pod_that_names_another_pod_as_its_owner_takes_nothing_of_it(self, replica: Replica, says: Raw) -> None:
        """Anybody may: the webhook does not look at a Pod that asks for nothing, nor at any where this is disabled."""
        record = {"vke.volcengine.com/gpu-index-container-c": "0"}
        given(replica, b.share("victim", 30, annotations=record, node="n1"))
        raw = own_pod()
        raw["metadata"] |= {"annotations": says, "ownerReferences": [OWNER | {"uid": "uid-victim"}]}
        given(replica, raw)
        assert said(replica)[0] == ("", 300, 700)
        gone(replica, raw)
        assert said(replica)[0] == ("", 300, 700)

    def test_a_node_that_says_it_gave_it_cards_takes_nothing_of_it(self) -> None:
        replica = Replica(cluster(("n1", 3), ("n2", 1)))
        lies = copy.deepcopy(replica.api.devices["n2"])
        row = {"podUID": "uid-m", "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ["GPU-n2-0"]}
        lies["metadata"]["annotations"] = {CHECKPOINTS: json.dumps([row])}
        for other in (lies, replica.api.devices["n2"], lies):
            replica.api.put("devices", other)
            replica.deliver()
            given(replica, b.mtgpupod(bound="GPU-n1-1"))
            assert said(replica)[1] == ("zxcvb", 200, 0)

    def test_one_that_cannot_be_read_holds_all_of_its_card(self, replica: Replica) -> None:
        raw = b.mtgpupod(bound="GPU-n1-1", annotations={"lsalab.nthu/gpu_request": "half"})
        given(replica, raw)
        assert said(replica) == [FREE, ("", 1000, 0), FREE]

    def test_what_comes_free_is_told(self, replica: Replica) -> None:
        raw = given(replica, b.mtgpupod(bound="GPU-n1-1"))
        replica.freed.clear()
        gone(replica, raw)
        assert replica.freed == ["n1"]


class TestEverybodyElse:
    def share(self, replica: Replica) -> Rejection:
        given(replica, b.mtgpupod("x", "other", bound="GPU-n1-0"))
        given(replica, b.mtgpupod("y", "third", bound="GPU-n1-2"))
        given(replica, b.mtgpupod(request="0", bound="GPU-n1-1"))
        found = decided(replica, given(replica, b.share("p", 10)))
        assert isinstance(found, Rejection)
        return found

    def test_a_share_finds_no_room_there_and_is_told_why(self, replica: Replica) -> None:
        assert str(self.share(replica)) == "3 cards: 3 in use by MtgpuPods"

    def test_no_eviction_helps(self, replica: Replica) -> None:
        assert self.share(replica).hopeless

    def test_a_share_goes_to_another_card(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-0"))
        assert cards_of(decided(replica, given(replica, b.share("p", 10)))) == [1]

    def test_what_was_kept_for_a_nominated_pod_moves_away(self, replica: Replica) -> None:
        raw = b.share("p", 60)
        raw["status"]["nominatedNodeName"] = "n1"
        given(replica, raw)
        assert [s.core_free for s in replica.state.node_snapshot("n1", "").available_cards] == [400, 1000, 1000]
        given(replica, b.mtgpupod(bound="GPU-n1-0"))
        assert [s.core_free for s in replica.state.node_snapshot("n1", "").available_cards] == [0, 400, 1000]

    def test_an_occupy_pod_that_goes_leaves_its_card_to_its_mtgpupods(self, replica: Replica) -> None:
        """What is kept for nominated pods is chosen among cards without what is being deleted."""
        for index, gpuid in enumerate(("zxcvb", "qwert", "asdfg")):
            given(replica, b.mtgpupod(gpuid, gpuid, bound=f"GPU-n1-{index}"))
            leaving = b.occupy_pod(gpuid, card=index)
            leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            given(replica, leaving)
        raw = b.share("p", 60)
        raw["status"]["nominatedNodeName"] = "n1"
        given(replica, raw)
        assert replica.state.node_snapshot("n1", "").available_cards == replica.state.node_snapshot("n1", "").cards


class TestOccupyPods:
    def test_beside_its_mtgpupods_it_is_not_counted(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        given(replica, b.occupy_pod(card=1))
        assert said(replica) == [FREE, ("zxcvb", 200, 0), FREE]
        assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": "GPU-n1-1"}

    def test_alone_it_has_the_card_for_its_gpuid(self, replica: Replica) -> None:
        given(replica, b.occupy_pod(card=1))
        assert said(replica) == [FREE, ("zxcvb", 0, 0), FREE]

    def test_on_another_card_it_holds_that_one_as_any_pod_does(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        given(replica, b.occupy_pod(card=2))
        assert said(replica) == [FREE, ("zxcvb", 200, 0), ("", 1000, 0)]
        assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": "GPU-n1-2"}

    def test_one_of_another_node_s_name_is_a_pod_like_any(self, replica: Replica) -> None:
        raw = b.occupy_pod(card=1)
        raw["metadata"]["name"] = "mtgpupod-occupypod-n2-zxcvb"
        given(replica, raw)
        assert said(replica)[1] == ("", 1000, 0)

    def test_it_gets_the_card_to_which_its_mtgpupods_were_admitted(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", "GPU-n1-2"), ("k", "other", "GPU-n1-0"))
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == [2]
        assert said(replica) == [("other", 200, 0), FREE, ("zxcvb", 200, 0)]

    def test_and_no_other_when_that_one_is_ill(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-0"))
        device = copy.deepcopy(replica.api.devices["n1"])
        device["spec"]["devices"][0]["health"] = False
        replica.api.put("devices", device)
        found = decided(replica, given(replica, unbound(b.occupy_pod())))
        assert str(found) == "1 card: 1 unhealthy"

    def test_without_a_reservation_any_idle_card(self, replica: Replica) -> None:
        given(replica, b.mtgpupod("k", "other", bound="GPU-n1-0"))
        given(replica, b.share("p", annotations={"vke.volcengine.com/gpu-index-container-c": "1"}, node="n1"))
        assert cards_of(decided(replica, given(replica, unbound(b.occupy_pod())))) == [2]

    def test_its_reservation_follows_its_mtgpupods_to_another_card(self, replica: Replica) -> None:
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == [0]
        assert on(replica).occupied == {}  # it has none for sure until it is bound
        assert admit(replica, ("m", "zxcvb", "GPU-n1-1"))
        assert cards_of(decided(replica, raw)) == [1]
        assert said(replica) == [FREE, ("zxcvb", 200, 0), FREE]

    def test_one_that_the_watch_has_not_brought_yet_is_known_by_its_name(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", "GPU-n1-2"))
        assert cards_of(decided(replica, unbound(b.occupy_pod()))) == [2]
        assert said(replica)[2] == ("zxcvb", 200, 0)

    def test_the_filter_finds_what_the_decision_does(self, replica: Replica) -> None:
        for index, gpuid in enumerate(("zxcvb", "qwert", "asdfg")):
            given(replica, b.mtgpupod(gpuid, gpuid, bound=f"GPU-n1-{index}"))
        assert filtered(replica, given(replica, unbound(b.occupy_pod()))).passed == ["n1"]
        other = filtered(replica, given(replica, unbound(b.occupy_pod("fresh"))))
        assert other.hopeless == {"n1": "insufficient GPU (3 cards: 3 in use by MtgpuPods)"}

    def test_it_is_never_evicted_not_even_from_a_card_that_is_not_its_mtgpupods(self, replica: Replica) -> None:
        for index in range(3):
            given(replica, b.mtgpupod(f"m{index}", f"g{index}", bound="GPU-n1-0" if index else "GPU-n1-2"))
            given(replica, b.occupy_pod(f"g{index}", card=index))
        for proposed in ((), ("uid-mtgpupod-occupypod-n1-g0",)):
            assert self.evicted(replica, *proposed) == {}

    def test_nor_is_it_where_kube_scheduler_has_chosen_it_itself(self, replica: Replica) -> None:
        given(replica, b.occupy_pod(card=0))
        assert self.evicted(replica, "uid-mtgpupod-occupypod-n1-zxcvb") == {}

    def evicted(self, replica: Replica, *proposed: str) -> dict[str, Victims]:
        raw = b.share("p", 50)
        raw["spec"]["priority"] = 2_000_000_000
        given(replica, raw)
        known = replica.state.gpu_pod("uid-p")
        assert known is not None
        return replica.preemption.choose(known, raw, {"n1": Victims(proposed)})


class TestAdmissions:
    def test_they_hold_until_they_are_bound_withdrawn_or_gone(self, replica: Replica) -> None:
        assert admit(replica, ("a", "x", "GPU-n1-0"), ("b", "x", "GPU-n1-0"), ("c", "y", "GPU-n1-1"))
        assert [used for _, used, _ in said(replica)] == [400, 200, 0]
        assert sorted(on(replica).admitted) == ["uid-a", "uid-b", "uid-c"]
        given(replica, b.mtgpupod("a", "x", bound="GPU-n1-0"))
        assert admit(replica, ("c", "y", "GPU-n1-1"))
        gone(replica, b.mtgpupod("c", "y"))
        assert said(replica) == [("x", 200, 0), FREE, FREE]
        assert on(replica).admitted == {}

    def test_what_the_watch_says_wins(self, replica: Replica) -> None:
        version = on(replica).version
        given(replica, b.mtgpupod("a", "x", bound="GPU-n1-0"))
        assert not admit(replica, ("b", "y", "GPU-n1-1"), version=version)
        stale = mtgpu.holding(mtgpu.read_mtgpupod(b.mtgpupod("a", "x")), "GPU-n1-2", bound=False)
        assert replica.state.mtgpupods.admit("n1", [stale], on(replica).version)
        assert on(replica).admitted == {}
        assert said(replica) == [("x", 200, 0), FREE, FREE]

    def test_those_that_are_not_named_again_are_withdrawn(self, replica: Replica) -> None:
        assert admit(replica, ("a", "x", "GPU-n1-0"), ("b", "y", "GPU-n1-1"))
        assert admit(replica, ("b", "y", "GPU-n1-1"))
        assert said(replica) == [FREE, ("y", 200, 0), FREE]

    def test_a_node_that_has_changed_is_looked_at_again(self, replica: Replica) -> None:
        version = on(replica).version
        decided(replica, given(replica, b.share("p", 10)))
        assert not admit(replica, ("a", "x", "GPU-n1-0"), version=version)
        assert on(replica).admitted == {}

    def test_one_that_is_not_known_here_is_not_admitted(self, replica: Replica) -> None:
        """Deleted meanwhile: nobody would ever withdraw it."""
        held = mtgpu.holding(mtgpu.read_mtgpupod(b.mtgpupod()), "GPU-n1-0", bound=False)
        assert not replica.state.mtgpupods.admit("n1", [held], on(replica).version)
        assert said(replica) == [FREE] * 3

    def test_the_same_again_touches_nothing(self, replica: Replica) -> None:
        assert admit(replica, ("a", "x", "GPU-n1-0"))
        before = on(replica)
        assert replica.state.mtgpupods.admit("n1", before.admitted.values(), before.version)
        assert on(replica) == before

    def test_another_term_begins_without_them(self, replica: Replica) -> None:
        given(replica, b.mtgpupod("a", "x", bound="GPU-n1-0"))
        assert admit(replica, ("b", "x", "GPU-n1-0"), ("c", "y", "GPU-n1-1"))
        replica.state.mtgpupods.drop_admissions()
        assert said(replica) == [("x", 200, 0), FREE, FREE]

    def test_a_decision_made_meanwhile_is_made_again(self, replica: Replica) -> None:
        """Under one lock, by one version: a card is never a share's and a GPUID's."""
        raw = given(replica, b.share("p", 10))
        known = read_gpu_pod(raw, SETTINGS)
        assert known is not None
        version = replica.state.node_snapshot("n1", "uid-p").version
        first = replica.decider.decide(known, "n1", reserve=False)
        assert isinstance(first, Reservation)
        assert admit(replica, ("a", "x", "GPU-n1-0"))
        assert not replica.state.reserve(first, version)
        assert cards_of(replica.decider.decide(known, "n1")) == [1]


class TestWhereNvidiasPluginChooses:
    @pytest.fixture
    def replica(self, api: FakeApi, koordinator: bool) -> Replica:
        api.put("nodes", b.node("n1", labels=STOCK))
        enabled = str(koordinator).lower()
        return Replica(api, settings=load_settings(f"dialects: {{koordinator: {{enabled: {enabled}}}}}"))

    @pytest.fixture(params=[True, False], ids=["koordinator", "without koordinator"])
    def koordinator(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    def told(self, replica: Replica, *rows: tuple[str, str]) -> None:
        """(GPUID, card) of occupy pods, as the kubelet gave them."""
        device = copy.deepcopy(replica.api.devices["n1"])
        device["metadata"]["annotations"] = {
            "node.koordinator.sh/devices-checkpoints": json.dumps(
                [
                    {
                        "podUID": f"uid-mtgpupod-occupypod-n1-{gpuid}",
                        "containerName": "occupy",
                        "resourceName": "nvidia.com/gpu",
                        "deviceIDs": [card],
                    }
                    for gpuid, card in rows
                ]
            )
        }
        replica.api.put("devices", device)
        replica.deliver()

    def test_the_card_is_the_one_that_the_occupy_pod_was_given(self, replica: Replica) -> None:
        given(replica, b.occupy_pod())
        self.told(replica, ("zxcvb", "GPU-n1-2"))
        assert said(replica) == [FREE, FREE, ("zxcvb", 0, 0)]
        assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": "GPU-n1-2"}
        given(replica, b.mtgpupod(bound="GPU-n1-2"))
        assert said(replica) == [FREE, FREE, ("zxcvb", 200, 0)]
        assert mgpu_cards(replica) == ()

    def test_told_before_the_pod_is_seen_or_after_is_the_same(self, replica: Replica) -> None:
        self.told(replica, ("zxcvb", "GPU-n1-2"))
        given(replica, b.occupy_pod())
        assert said(replica) == [FREE, FREE, ("zxcvb", 0, 0)]

    def test_until_then_every_card_is_held_by_the_admission(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", None))
        assert [free for *_, free in said(replica)] == [0, 0, 0]
        assert mgpu_cards(replica) == ()

    def test_a_card_whose_occupy_pod_is_missing_or_elsewhere_could_be_given_out(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        assert mgpu_cards(replica) == (1,)
        pod = given(replica, b.occupy_pod())
        self.told(replica, ("zxcvb", "GPU-n1-2"))
        assert mgpu_cards(replica) == (1,)
        self.told(replica, ("zxcvb", "GPU-n1-1"))
        assert mgpu_cards(replica) == ()
        given(replica, {**pod, "status": {"phase": "Failed"}})
        assert mgpu_cards(replica) == (1,)


class TestItsBindingWhereNvidiasPluginChooses:
    @pytest.fixture
    def replica(self, api: FakeApi) -> Replica:
        api.put("nodes", b.node("n1", labels=STOCK))
        return Replica(api)

    def test_it_passes_though_its_mtgpupods_hold_every_card(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", None))
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == []
        assert filtered(replica, raw).passed == ["n1"]

    def test_one_that_was_lost_may_come_back_and_another_may_not_come(self, replica: Replica) -> None:
        """NVIDIA's plugin could give the other one the card that the first one's MtgpuPods use."""
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == []
        assert filtered(replica, raw).passed == ["n1"]
        replica.state.cancel(replica.state.reservation(raw["metadata"]["uid"]))  # type: ignore[arg-type]
        other = given(replica, unbound(b.occupy_pod("other")))
        assert isinstance(decided(replica, other), Rejection)
        assert filtered(replica, other).passed == []

    def test_two_that_were_lost_at_once_do_not_wait_for_each_other(self, replica: Replica) -> None:
        for index, gpuid in enumerate(("zxcvb", "qwert")):
            given(replica, b.mtgpupod(gpuid, gpuid, bound=f"GPU-n1-{index}"))
        for gpuid in ("zxcvb", "qwert"):
            raw = given(replica, unbound(b.occupy_pod(gpuid)))
            assert filtered(replica, raw).passed == ["n1"]
            assert cards_of(decided(replica, raw)) == []

    def test_a_share_that_was_there_before_keeps_it_out(self, replica: Replica) -> None:
        given(replica, b.share("p", annotations={"vke.volcengine.com/gpu-index-container-c": "1"}, node="n1"))
        assert mgpu_cards(replica) == (1,)
        assert isinstance(decided(replica, given(replica, unbound(b.occupy_pod()))), Rejection)


def test_holdings_that_change_affect_mtgpupods_of_their_node_and_of_no_other() -> None:
    state = ClusterCache(SETTINGS)
    for name in ("n1", "n2"):
        state.node_changed(b.node(name))
    state.mtgpupods.mtgpupod_changed(b.mtgpupod())
    affected: set[str] = set()
    state.subscribe(MtgpuPodsAffected, lambda event: affected.add(event.node))
    state.pod_changed(b.share("p", annotations={"vke.volcengine.com/gpu-index-container-c": "0"}, node="n2"))
    assert affected == set(), "there is no MtgpuPod on that node"
    state.pod_changed(b.share("q", annotations={"vke.volcengine.com/gpu-index-container-c": "0"}, node="n1"))
    assert affected == {"n1"}
    affected.clear()
    assert state.mtgpupods.admit("n1", [], state.mtgpupods.snapshot("n1").node.version)
    assert affected == set(), "nothing was admitted or withdrawn"


def test_an_occupy_pod_that_was_bound_without_a_record_is_decided_late(replica: Replica) -> None:
    """The Binding's webhook could not be reached."""
    assert admit(replica, ("m", "zxcvb", "GPU-n1-2"))
    given(replica, b.occupy_pod())
    assert replica.state.undecided_pods() == ("uid-mtgpupod-occupypod-n1-zxcvb",)
    replica.late.work()
    replica.deliver()
    assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": "GPU-n1-2"}


def test_whoever_holds_a_card_under_a_gpuid_is_told_apart() -> None:
    replica = Replica(cluster(("n1", 1)))
    given(replica, b.mtgpupod(bound="GPU-n1-0"))
    given(replica, b.occupy_pod(card=0))
    kinds = {(h.name, h.gpuid, h.occupies, h.bound) for h in replica.state.holdings()}
    assert kinds == {("m", "zxcvb", False, True), ("mtgpupod-occupypod-n1-zxcvb", "zxcvb", True, True)}
    assert all(isinstance(h, Holding) for h in on(replica).held)


class TestSealed:
    """Where records are sealed, a Pod counts for an MtgpuPod only if the controller made it."""

    signer = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    records = RecordVerifier(Keys("2020-01-01T00:00:00Z", {signer.id: signer.key.public_key()}, signer))

    def own(self, name: str = "m", *, seal: bool) -> Raw:
        annotations = b.mtgpupod()["metadata"]["annotations"]
        container = {"name": "c", "env": [{"name": mtgpu.VISIBLE, "value": "GPU-n1-1"}]}
        raw = b.pod(name, container, annotations=dict(annotations), node="n1", uid=f"pod-{name}", phase="Running")
        raw["metadata"]["ownerReferences"] = [b.owned("m")]
        if seal:
            raw["metadata"]["annotations"] |= self.records.sealed_mtgpu(raw, "uid-m")
        return raw

    @pytest.mark.parametrize("bare", [False, True], ids=["whole", "owner alone"])
    def test_a_pod_that_names_an_ended_mtgpupod_as_its_owner_keeps_nothing_held(self, *, bare: bool) -> None:
        replica = Replica(cluster(("n1", 3)), records=self.records)
        replica.deliver()
        given(replica, b.mtgpupod(bound="GPU-n1-1", phase="Succeeded"))
        forged = self.own("thief", seal=False)
        if bare:
            forged["metadata"]["annotations"] = {}
            forged["spec"]["containers"] = [{"name": "c"}]
        replica.state.pod_changed(forged)
        assert said(replica) == [FREE, FREE, FREE]
        assert [(name, str(reason)) for name, reason, _ in replica.events] == [("thief", "UnsealedRecord")]
        replica.state.pod_changed(self.own(seal=True))
        assert said(replica) == [FREE, ("zxcvb", 200, 0), FREE]
        replica.state.pod_gone(self.own(seal=True))
        assert said(replica) == [FREE, FREE, FREE]

    def test_a_pod_without_an_mtgpupod_holds_nothing_by_what_it_says(self) -> None:
        replica = Replica(cluster(("n1", 3)), records=self.records)
        replica.deliver()
        replica.state.pod_changed(self.own(seal=False))
        assert said(replica) == [FREE, FREE, FREE]
