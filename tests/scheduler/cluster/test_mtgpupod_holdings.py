"""What MtgpuPods and their occupy pods hold, and what other pods get beside them."""

import copy
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
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
from tests.scheduler.cluster.objects import given_row, record, report
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
    """Return the Pod of MtgpuPod m."""
    said = b.mtgpupod()["metadata"]["annotations"]
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": card}]
    raw = b.pod("m", b.container(env=env), annotations=said, node="n1", uid=uid, **more)
    raw["metadata"]["ownerReferences"] = [] if orphan else [OWNER]
    return raw


def unbound(raw: Raw) -> Raw:
    del raw["spec"]["nodeName"]
    return raw


def card_states(replica: Replica) -> list[tuple[str, int, int]]:
    """Return for each card its GPUID, the used part, and the part that is free for other pods than MtgpuPods."""
    return [(s.gpuid, s.core_used, s.core_free) for s in replica.state.node_snapshot("n1", "").cards]


def decided(replica: Replica, raw: Raw) -> Reservation | Rejection:
    """Decide the pod and reserve its cards, as the admission of its Binding does."""
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    return replica.decider.decide(known, "n1")


def cards_of(found: Reservation | Rejection) -> list[int]:
    assert isinstance(found, Reservation), found
    return [index for _, chosen in found.placement.containers for index in chosen]


def admit(replica: Replica, *rows: tuple[str, str, object], version: int | None = None) -> bool:
    """Create MtgpuPods that request 0.2, by name, GPUID and card, and admit them."""
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
    @pytest.mark.parametrize(
        ("mtgpupods", "expected"),
        [
            pytest.param([b.mtgpupod()], ("", 0, 1000), id="not bound"),
            pytest.param([b.mtgpupod(bound="GPU-n1-1")], ("zxcvb", 200, 0), id="bound"),
            pytest.param(
                [b.mtgpupod(name, request="0.3", bound="GPU-n1-1") for name in "abcdef"],
                ("zxcvb", 1800, 0),
                id="more than the card has",
            ),
            pytest.param(
                [b.mtgpupod(bound="GPU-n1-1", annotations={"lsalab.nthu/gpu_request": "half"})],
                ("", 1000, 0),
                id="unreadable",
            ),
        ],
    )
    def test_mtgpupods_hold_their_card(
        self, replica: Replica, mtgpupods: list[Raw], expected: tuple[str, int, int]
    ) -> None:
        for raw in mtgpupods:
            given(replica, raw)
        assert card_states(replica) == [FREE, expected, FREE]

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_ended_mtgpupod_holds_its_card_while_its_pod_runs(self, replica: Replica, phase: str) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1", phase=phase))
        assert card_states(replica) == [FREE] * 3
        given(replica, own_pod(phase="Running"))
        assert card_states(replica)[1] == ("zxcvb", 200, 0)
        given(replica, own_pod(phase="Succeeded"))
        assert card_states(replica) == [FREE] * 3

    def test_pod_with_an_injected_first_container_holds_its_card(self, replica: Replica) -> None:
        raw = own_pod(phase="Running")
        raw["spec"]["containers"].insert(0, b.container("mesh"))
        given(replica, raw)
        assert card_states(replica)[1] == ("zxcvb", 200, 0)

    def test_pod_without_owner_reference_is_found_by_the_status(self, replica: Replica) -> None:
        raw = b.mtgpupod(bound="GPU-n1-1", phase="Failed")
        raw["status"]["PodObjectMeta"] = {"uid": "uid-own"}
        given(replica, own_pod(phase="Running", orphan=True))
        assert card_states(replica) == [FREE] * 3
        given(replica, raw)
        assert card_states(replica)[1] == ("zxcvb", 200, 0)
        given(replica, own_pod(phase="Succeeded", orphan=True))
        assert card_states(replica) == [FREE] * 3

    def test_pod_holds_its_card_after_its_mtgpupod_is_deleted(self, replica: Replica) -> None:
        raw, pod = given(replica, b.mtgpupod(bound="GPU-n1-1")), given(replica, own_pod(phase="Running"))
        gone(replica, raw)
        assert card_states(replica)[1] == ("zxcvb", 200, 0)
        gone(replica, pod)
        assert card_states(replica) == [FREE] * 3

    @pytest.mark.parametrize("says", [{}, b.mtgpupod()["metadata"]["annotations"]], ids=["nothing", "a share"])
    def test_pod_whose_owner_is_another_pod_leaves_its_holding_alone(self, replica: Replica, says: Raw) -> None:
        """Users can create it, since the webhook does not validate a Pod without a request."""
        given(replica, b.share("victim", 30, annotations=record(), node="n1"))
        raw = own_pod()
        raw["metadata"] |= {"annotations": says, "ownerReferences": [OWNER | {"uid": "uid-victim"}]}
        given(replica, raw)
        assert card_states(replica)[0] == ("", 300, 700)
        gone(replica, raw)
        assert card_states(replica)[0] == ("", 300, 700)

    def test_report_of_another_node_leaves_the_holding_alone(self) -> None:
        replica = Replica(cluster(("n1", 3), ("n2", 1)))
        lie = given_row("uid-m", "GPU-n2-0")
        for rows in ([lie], [], [lie]):
            report(replica.api, *rows, node="n2")
            replica.deliver()
            given(replica, b.mtgpupod(bound="GPU-n1-1"))
            assert card_states(replica)[1] == ("zxcvb", 200, 0)

    def test_freed_share_is_announced(self, replica: Replica) -> None:
        raw = given(replica, b.mtgpupod(bound="GPU-n1-1"))
        replica.freed.clear()
        gone(replica, raw)
        assert replica.freed == ["n1"]


class TestOtherPods:
    def test_share_is_rejected_on_cards_of_mtgpupods_and_no_eviction_helps(self, replica: Replica) -> None:
        given(replica, b.mtgpupod("x", "other", bound="GPU-n1-0"))
        given(replica, b.mtgpupod("y", "third", bound="GPU-n1-2"))
        given(replica, b.mtgpupod(request="0", bound="GPU-n1-1"))
        rejection = decided(replica, given(replica, b.share("p", 10)))
        assert isinstance(rejection, Rejection)
        assert str(rejection) == "3 cards: 3 in use by MtgpuPods"
        assert rejection.hopeless

    def test_share_goes_to_another_card(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-0"))
        assert cards_of(decided(replica, given(replica, b.share("p", 10)))) == [1]

    def test_nominated_pod_gets_another_card_than_a_new_mtgpupod(self, replica: Replica) -> None:
        raw = b.share("p", 60)
        raw["status"]["nominatedNodeName"] = "n1"
        given(replica, raw)
        assert [s.core_free for s in replica.state.node_snapshot("n1", "").available_cards] == [400, 1000, 1000]
        given(replica, b.mtgpupod(bound="GPU-n1-0"))
        assert [s.core_free for s in replica.state.node_snapshot("n1", "").available_cards] == [0, 400, 1000]

    def test_card_of_a_deleted_occupy_pod_is_not_set_aside_for_nominated_pods(self, replica: Replica) -> None:
        """Cards are set aside for nominated pods as if deleted pods were gone."""
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
    @pytest.mark.parametrize(
        ("mtgpupods", "card", "expected"),
        [
            pytest.param([], 1, [FREE, ("zxcvb", 0, 0), FREE], id="alone"),
            pytest.param([b.mtgpupod(bound="GPU-n1-1")], 1, [FREE, ("zxcvb", 200, 0), FREE], id="on their card"),
            pytest.param(
                [b.mtgpupod(bound="GPU-n1-1")], 2, [FREE, ("zxcvb", 200, 0), ("", 1000, 0)], id="on another card"
            ),
        ],
    )
    def test_occupy_pod_holds_its_card_but_not_beside_its_mtgpupods(
        self, replica: Replica, mtgpupods: list[Raw], card: int, expected: list[tuple[str, int, int]]
    ) -> None:
        for raw in (*mtgpupods, b.occupy_pod(card=card)):
            given(replica, raw)
        assert card_states(replica) == expected
        assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": f"GPU-n1-{card}"}

    def test_occupy_pod_with_the_name_of_another_node_is_an_ordinary_pod(self, replica: Replica) -> None:
        raw = b.occupy_pod(card=1)
        raw["metadata"]["name"] = "mtgpupod-occupypod-n2-zxcvb"
        given(replica, raw)
        assert card_states(replica)[1] == ("", 1000, 0)

    def test_occupy_pod_gets_the_card_to_which_its_mtgpupods_are_admitted(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", "GPU-n1-2"), ("k", "other", "GPU-n1-0"))
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == [2]
        assert card_states(replica) == [("other", 200, 0), FREE, ("zxcvb", 200, 0)]

    def test_occupy_pod_gets_no_other_card_if_that_card_is_unhealthy(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-0"))
        device = copy.deepcopy(replica.api.devices["n1"])
        device["spec"]["devices"][0]["health"] = False
        replica.api.put("devices", device)
        found = decided(replica, given(replica, unbound(b.occupy_pod())))
        assert str(found) == "1 card: 1 unhealthy"

    def test_occupy_pod_without_mtgpupods_gets_an_idle_card(self, replica: Replica) -> None:
        given(replica, b.mtgpupod("k", "other", bound="GPU-n1-0"))
        given(replica, b.share("p", annotations=record("1"), node="n1"))
        assert cards_of(decided(replica, given(replica, unbound(b.occupy_pod())))) == [2]

    def test_reservation_of_an_occupy_pod_moves_to_the_card_of_its_mtgpupods(self, replica: Replica) -> None:
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == [0]
        assert on(replica).occupied == {}  # Its card is not certain until it is bound.
        assert admit(replica, ("m", "zxcvb", "GPU-n1-1"))
        assert cards_of(decided(replica, raw)) == [1]
        assert card_states(replica) == [FREE, ("zxcvb", 200, 0), FREE]

    def test_occupy_pod_that_is_not_stored_yet_is_recognized_by_its_name(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", "GPU-n1-2"))
        assert cards_of(decided(replica, unbound(b.occupy_pod()))) == [2]
        assert card_states(replica)[2] == ("zxcvb", 200, 0)

    def test_filter_passes_occupy_pods_only_of_gpuids_with_a_card(self, replica: Replica) -> None:
        for index, gpuid in enumerate(("zxcvb", "qwert", "asdfg")):
            given(replica, b.mtgpupod(gpuid, gpuid, bound=f"GPU-n1-{index}"))
        assert filtered(replica, given(replica, unbound(b.occupy_pod()))).passed == ["n1"]
        other = filtered(replica, given(replica, unbound(b.occupy_pod("fresh"))))
        assert other.hopeless == {"n1": "insufficient GPU (3 cards: 3 in use by MtgpuPods)"}

    @pytest.mark.parametrize("proposed", [(), ("uid-mtgpupod-occupypod-n1-g0",)])
    def test_occupy_pod_is_never_evicted_even_from_another_card_or_if_proposed(
        self, replica: Replica, proposed: tuple[str, ...]
    ) -> None:
        for index in range(3):
            given(replica, b.mtgpupod(f"m{index}", f"g{index}", bound="GPU-n1-0" if index else "GPU-n1-2"))
            given(replica, b.occupy_pod(f"g{index}", card=index))
        raw = b.share("p", 50)
        raw["spec"]["priority"] = 2_000_000_000
        given(replica, raw)
        known = replica.state.gpu_pod("uid-p")
        assert known is not None
        assert replica.preemption.choose(known, raw, {"n1": Victims(proposed)}) == {}


class TestAdmissions:
    def test_admission_holds_until_the_mtgpupod_is_bound_withdrawn_or_deleted(self, replica: Replica) -> None:
        assert admit(replica, ("a", "x", "GPU-n1-0"), ("b", "x", "GPU-n1-0"), ("c", "y", "GPU-n1-1"))
        assert [used for _, used, _ in card_states(replica)] == [400, 200, 0]
        assert sorted(on(replica).admitted) == ["uid-a", "uid-b", "uid-c"]
        given(replica, b.mtgpupod("a", "x", bound="GPU-n1-0"))
        assert admit(replica, ("c", "y", "GPU-n1-1"))
        gone(replica, b.mtgpupod("c", "y"))
        assert card_states(replica) == [("x", 200, 0), FREE, FREE]
        assert on(replica).admitted == {}

    def test_admission_of_a_bound_mtgpupod_is_ignored(self, replica: Replica) -> None:
        version = on(replica).version
        given(replica, b.mtgpupod("a", "x", bound="GPU-n1-0"))
        assert not admit(replica, ("b", "y", "GPU-n1-1"), version=version)
        stale = mtgpu.holding(mtgpu.read_mtgpupod(b.mtgpupod("a", "x")), "GPU-n1-2", bound=False)
        assert replica.state.mtgpupods.admit("n1", [stale], on(replica).version)
        assert on(replica).admitted == {}
        assert card_states(replica) == [("x", 200, 0), FREE, FREE]

    def test_admission_that_is_not_repeated_is_withdrawn(self, replica: Replica) -> None:
        assert admit(replica, ("a", "x", "GPU-n1-0"), ("b", "y", "GPU-n1-1"))
        assert admit(replica, ("b", "y", "GPU-n1-1"))
        assert card_states(replica) == [FREE, ("y", 200, 0), FREE]

    def test_admission_by_an_outdated_version_is_rejected(self, replica: Replica) -> None:
        version = on(replica).version
        decided(replica, given(replica, b.share("p", 10)))
        assert not admit(replica, ("a", "x", "GPU-n1-0"), version=version)
        assert on(replica).admitted == {}

    def test_admission_of_an_unknown_mtgpupod_is_rejected(self, replica: Replica) -> None:
        """If the MtgpuPod was deleted meanwhile, no event would withdraw its admission."""
        held = mtgpu.holding(mtgpu.read_mtgpupod(b.mtgpupod()), "GPU-n1-0", bound=False)
        assert not replica.state.mtgpupods.admit("n1", [held], on(replica).version)
        assert card_states(replica) == [FREE] * 3

    def test_admission_that_is_repeated_changes_nothing(self, replica: Replica) -> None:
        assert admit(replica, ("a", "x", "GPU-n1-0"))
        before = on(replica)
        assert replica.state.mtgpupods.admit("n1", before.admitted.values(), before.version)
        assert on(replica) == before

    def test_drop_admissions_leaves_only_bound_mtgpupods(self, replica: Replica) -> None:
        given(replica, b.mtgpupod("a", "x", bound="GPU-n1-0"))
        assert admit(replica, ("b", "x", "GPU-n1-0"), ("c", "y", "GPU-n1-1"))
        replica.state.mtgpupods.drop_admissions()
        assert card_states(replica) == [("x", 200, 0), FREE, FREE]

    def test_reservation_by_a_version_before_an_admission_is_rejected(self, replica: Replica) -> None:
        """Otherwise a card could have a share and a GPUID."""
        raw = given(replica, b.share("p", 10))
        known = read_gpu_pod(raw, SETTINGS)
        assert known is not None
        version = replica.state.node_snapshot("n1", "uid-p").version
        first = replica.decider.decide(known, "n1", reserve=False)
        assert isinstance(first, Reservation)
        assert admit(replica, ("a", "x", "GPU-n1-0"))
        assert not replica.state.reservations.reserve(first, version)
        assert cards_of(replica.decider.decide(known, "n1")) == [1]


class TestNvidiaPluginNode:
    @pytest.fixture
    def replica(self, api: FakeApi, koordinator: bool) -> Replica:
        api.put("nodes", b.node("n1", labels=STOCK))
        enabled = str(koordinator).lower()
        return Replica(api, settings=load_settings(f"dialects: {{koordinator: {{enabled: {enabled}}}}}"))

    @pytest.fixture(params=[True, False], ids=["koordinator", "without koordinator"])
    def koordinator(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    def report(self, replica: Replica, card: str) -> None:
        """Report the card that the kubelet gave to the occupy pod."""
        report(replica.api, {**given_row("uid-mtgpupod-occupypod-n1-zxcvb", card), "containerName": "occupy"})
        replica.deliver()

    def test_gpuid_has_the_card_that_its_occupy_pod_was_given(self, replica: Replica) -> None:
        given(replica, b.occupy_pod())
        self.report(replica, "GPU-n1-2")
        assert card_states(replica) == [FREE, FREE, ("zxcvb", 0, 0)]
        assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": "GPU-n1-2"}
        given(replica, b.mtgpupod(bound="GPU-n1-2"))
        assert card_states(replica) == [FREE, FREE, ("zxcvb", 200, 0)]
        assert mgpu_cards(replica) == ()

    def test_card_reported_before_its_occupy_pod_arrives_is_held(self, replica: Replica) -> None:
        self.report(replica, "GPU-n1-2")
        given(replica, b.occupy_pod())
        assert card_states(replica) == [FREE, FREE, ("zxcvb", 0, 0)]

    def test_admission_without_a_card_holds_every_card(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", None))
        assert [free for *_, free in card_states(replica)] == [0, 0, 0]
        assert mgpu_cards(replica) == ()

    def test_card_without_its_occupy_pod_is_one_that_mgpu_gave(self, replica: Replica) -> None:
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        assert mgpu_cards(replica) == (1,)
        pod = given(replica, b.occupy_pod())
        self.report(replica, "GPU-n1-2")
        assert mgpu_cards(replica) == (1,)
        self.report(replica, "GPU-n1-1")
        assert mgpu_cards(replica) == ()
        given(replica, {**pod, "status": {"phase": "Failed"}})
        assert mgpu_cards(replica) == (1,)


class TestOccupyPodOfNvidiaPluginNode:
    @pytest.fixture
    def replica(self, api: FakeApi) -> Replica:
        api.put("nodes", b.node("n1", labels=STOCK))
        return Replica(api)

    def test_occupy_pod_passes_though_its_mtgpupods_hold_every_card(self, replica: Replica) -> None:
        assert admit(replica, ("m", "zxcvb", None))
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == []
        assert filtered(replica, raw).passed == ["n1"]

    def test_lost_occupy_pod_passes_and_another_one_is_rejected(self, replica: Replica) -> None:
        """NVIDIA's plugin could give the other pod the card that MtgpuPods use."""
        given(replica, b.mtgpupod(bound="GPU-n1-1"))
        raw = given(replica, unbound(b.occupy_pod()))
        assert cards_of(decided(replica, raw)) == []
        assert filtered(replica, raw).passed == ["n1"]
        replica.state.reservations.cancel(replica.state.reservation(raw["metadata"]["uid"]))  # type: ignore[arg-type]
        other = given(replica, unbound(b.occupy_pod("other")))
        assert isinstance(decided(replica, other), Rejection)
        assert filtered(replica, other).passed == []

    def test_two_lost_occupy_pods_both_pass(self, replica: Replica) -> None:
        for index, gpuid in enumerate(("zxcvb", "qwert")):
            given(replica, b.mtgpupod(gpuid, gpuid, bound=f"GPU-n1-{index}"))
        for gpuid in ("zxcvb", "qwert"):
            raw = given(replica, unbound(b.occupy_pod(gpuid)))
            assert filtered(replica, raw).passed == ["n1"]
            assert cards_of(decided(replica, raw)) == []

    def test_occupy_pod_is_rejected_beside_an_earlier_share(self, replica: Replica) -> None:
        given(replica, b.share("p", annotations=record("1"), node="n1"))
        assert mgpu_cards(replica) == (1,)
        assert isinstance(decided(replica, given(replica, unbound(b.occupy_pod()))), Rejection)


def test_changed_holding_affects_only_the_mtgpupods_of_its_node() -> None:
    state = ClusterCache(SETTINGS)
    for name in ("n1", "n2"):
        state.node_changed(b.node(name))
    state.mtgpupods.mtgpupod_changed(b.mtgpupod())
    affected: set[str] = set()
    state.subscribe(MtgpuPodsAffected, lambda event: affected.add(event.node))
    state.pod_changed(b.share("p", annotations=record(), node="n2"))
    assert affected == set(), "there is no MtgpuPod on that node"
    state.pod_changed(b.share("q", annotations=record(), node="n1"))
    assert affected == {"n1"}
    affected.clear()
    assert state.mtgpupods.admit("n1", [], state.mtgpupods.snapshot("n1").node.version)
    assert affected == set(), "nothing was admitted or withdrawn"


def test_occupy_pod_bound_without_a_record_is_decided_late(replica: Replica) -> None:
    """The webhook for Bindings could not be reached."""
    assert admit(replica, ("m", "zxcvb", "GPU-n1-2"))
    given(replica, b.occupy_pod())
    assert replica.state.undecided_pods() == ("uid-mtgpupod-occupypod-n1-zxcvb",)
    replica.late.work()
    replica.deliver()
    assert on(replica).occupied == {"uid-mtgpupod-occupypod-n1-zxcvb": "GPU-n1-2"}


def test_holdings_of_mtgpupods_and_occupy_pods_can_be_told_apart() -> None:
    replica = Replica(cluster(("n1", 1)))
    given(replica, b.mtgpupod(bound="GPU-n1-0"))
    given(replica, b.occupy_pod(card=0))
    kinds = {(h.name, h.gpuid, h.occupies, h.bound) for h in replica.state.holdings()}
    assert kinds == {("m", "zxcvb", False, True), ("mtgpupod-occupypod-n1-zxcvb", "zxcvb", True, True)}
    assert all(isinstance(h, Holding) for h in on(replica).held)


class TestSealed:
    """If records are sealed, a Pod counts for an MtgpuPod only if the controller created it."""

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
    def test_unsealed_pod_of_an_ended_mtgpupod_holds_nothing(self, *, bare: bool) -> None:
        replica = Replica(cluster(("n1", 3)), records=self.records)
        replica.deliver()
        given(replica, b.mtgpupod(bound="GPU-n1-1", phase="Succeeded"))
        forged = self.own("thief", seal=False)
        if bare:
            forged["metadata"]["annotations"] = {}
            forged["spec"]["containers"] = [{"name": "c"}]
        replica.state.pod_changed(forged)
        assert card_states(replica) == [FREE, FREE, FREE]
        assert [(name, str(reason)) for name, reason, _ in replica.events] == [("thief", "UnsealedRecord")]
        replica.state.pod_changed(self.own(seal=True))
        assert card_states(replica) == [FREE, ("zxcvb", 200, 0), FREE]
        replica.state.pod_gone(self.own(seal=True))
        assert card_states(replica) == [FREE, FREE, FREE]

    def test_unsealed_pod_without_an_mtgpupod_holds_nothing(self) -> None:
        replica = Replica(cluster(("n1", 3)), records=self.records)
        replica.deliver()
        replica.state.pod_changed(self.own(seal=False))
        assert card_states(replica) == [FREE, FREE, FREE]
