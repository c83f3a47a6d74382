"""The limit on the GPUIDs that a namespace uses at once (`dialects.mtgpu.maxGPUIDsPerNamespace`)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.dialects import mtgpu
from mgpu.model.errors import BadObject
from mgpu.settings import load_settings
from scheduler.cluster.gpuids import GpuidLimit, UsedGpuids
from tests import builders as b
from tests.examples import examples
from tests.mtgpu_rig import ITEMS, Rig, items_path
from tests.scheduler.mtgpupods.rigged import bound
from tests.scheduler.mtgpupods.scene import cards_of, mtgpupod, occupy, planned, reason, said, uuid

ON_CARD: dict[str, Any] = {"card_uuid": uuid(0), "phase": "Running"}
TWO = load_settings("dialects: {mtgpu: {occupyPriorityClass: '', maxGPUIDsPerNamespace: 2}}")


class TestPlan:
    def test_gpuid_beyond_the_limit_gets_no_card(self) -> None:
        mine, more = mtgpupod("mine", "x", **ON_CARD), mtgpupod("more", "y")
        found = planned(mine, more, occupy_pods=occupy("x", card=0), gpuid_limit=GpuidLimit(1, {}))
        assert (reason(found, "mine"), reason(found, "more")) == ("Bound", "TooManyGPUIDs")
        assert found.limited_namespaces == {"default"}
        assert [step.gpuid for step in found.occupy_pod_steps] == []

    def test_gpuid_without_a_limit_gets_a_card(self) -> None:
        found = planned(mtgpupod("mine", "x", **ON_CARD), mtgpupod("more", "y"), occupy_pods=occupy("x", card=0))
        assert cards_of(found) == {"more": uuid(1)}
        assert found.limited_namespaces == frozenset()

    def test_mtgpupod_of_a_used_gpuid_is_within_the_limit(self) -> None:
        pods = [mtgpupod("mine", "x", **ON_CARD), mtgpupod("more", "x")]
        assert cards_of(planned(*pods, occupy_pods=occupy("x", card=0), gpuid_limit=GpuidLimit(1, {}))) == {
            "more": uuid(0)
        }

    def test_gpuids_of_other_nodes_count(self) -> None:
        found = planned(mtgpupod("m"), gpuid_limit=GpuidLimit(2, {"default": 2}))
        assert reason(found, "m") == "TooManyGPUIDs"
        assert cards_of(planned(mtgpupod("m"), gpuid_limit=GpuidLimit(2, {"default": 1, "other": 9}))) == {"m": uuid(0)}

    def test_last_gpuid_goes_to_the_first_of_two_mtgpupods(self) -> None:
        found = planned(mtgpupod("a", "x"), mtgpupod("b", "y"), gpuid_limit=GpuidLimit(1, {}))
        assert cards_of(found) == {"a": uuid(0)}
        assert reason(found, "b") == "TooManyGPUIDs"

    def test_gpuid_that_another_namespace_uses_too_counts(self) -> None:
        """Else two namespaces open cards for each other, and stay on them when the other one goes."""
        theirs = mtgpupod("theirs", "x", namespace="other", **ON_CARD)
        joins = mtgpupod("joins", "x")
        found = planned(theirs, joins, occupy_pods=occupy("x", card=0), gpuid_limit=GpuidLimit(1, {"default": 1}))
        assert (reason(found, "theirs"), reason(found, "joins")) == ("Bound", "TooManyGPUIDs")
        assert found.limited_namespaces == {"default"}

    def test_mtgpupod_keeps_its_card_when_the_limit_is_lowered(self) -> None:
        pods = [mtgpupod("a", "x", **ON_CARD), mtgpupod("b", "y", card_uuid=uuid(1), phase="Running")]
        occupies = {**occupy("x", card=0), **occupy("y", card=1)}
        found = planned(*pods, occupy_pods=occupies, gpuid_limit=GpuidLimit(1, {"default": 5}))
        assert (reason(found, "a"), reason(found, "b")) == ("Bound", "Bound")

    def test_message_names_the_setting_and_the_remedy(self) -> None:
        message = said(planned(mtgpupod("m"), gpuid_limit=GpuidLimit(2, {"default": 2})), "m").message
        assert message == (
            "namespace default uses as many GPUIDs as it may (dialects.mtgpu.maxGPUIDsPerNamespace: 2); "
            "name a GPUID that it uses on node n1, or delete the MtgpuPods of another GPUID"
        )


def test_used_gpuids_are_counted_by_namespace_and_node() -> None:
    used = UsedGpuids()
    for name, gpuid, namespace in [("a", "x", "one"), ("b", "x", "one"), ("c", "y", "one"), ("d", "x", "two")]:
        pod = mtgpupod(name, gpuid, namespace=namespace)
        used.put(pod.uid, mtgpu.holding(pod, 0))
    assert used.elsewhere(["one", "two", "three"], "n2") == {"one": 2, "two": 1, "three": 0}
    assert used.elsewhere(["one"], "n1") == {"one": 0}
    assert used.put("uid-a", None) is None  # b uses x too
    assert used.put("uid-b", None) == "one"
    assert used.put("uid-nobody", None) is None
    assert used.elsewhere(["one"], "n2") == {"one": 1}


def create(rig: Rig, name: str, gpuid: str, node: str, namespace: str = "default") -> None:
    if rig.cluster.storage.get("namespaces", "", namespace) is None:
        rig.cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    raw = b.mtgpupod(name, gpuid, "0.001", namespace=namespace, node=node, memory=1 << 20)
    rig.cluster.create(items_path(namespace), {key: raw[key] for key in raw if key != "status"})


def in_use(rig: Rig) -> dict[str, set[tuple[str, str]]]:
    """By namespace, the nodes and GPUIDs of its MtgpuPods that have a card, as the API has it."""
    found: dict[str, set[tuple[str, str]]] = {}
    for raw in rig.items():
        status = raw.get("status") or {}
        if status.get("BoundDeviceID") and status.get("phase") not in ("Succeeded", "Failed"):
            gpuid = raw["spec"]["nodeName"], raw["metadata"]["annotations"][mtgpu.GPUID]
            found.setdefault(raw["metadata"]["namespace"], set()).add(gpuid)
    return found


@pytest.fixture
def bounded() -> Rig:
    rig = Rig(("n1", 3, False), ("n2", 3, False))
    rig.settings = TWO
    rig.restart()
    return rig


class TestController:
    def test_namespace_gets_no_more_cards_than_its_limit_on_all_nodes(self, bounded: Rig) -> None:
        """With a GPUID each, a thousandth of a card is a card: one namespace took all of the cluster."""
        for i in range(6):
            create(bounded, f"m{i}", f"x{i}", f"n{1 + i % 2}")
        create(bounded, "v", "v", "n1", namespace="victim")
        bounded.settle()
        assert {name: len(used) for name, used in in_use(bounded).items()} == {"default": 2, "victim": 1}
        occupies = [raw for raw in bounded.pods() if mtgpu.OCCUPY_LABEL in (raw["metadata"].get("labels") or {})]
        assert len(occupies) == 3
        refused = [f"m{i}" for i in range(6) if bound(bounded, f"m{i}")[1] == "TooManyGPUIDs"]
        assert len(refused) == 4
        told = [(name, what.warning) for name, what in bounded.scheduler.told if what.reason == "TooManyGPUIDs"]
        assert sorted(told) == [(name, True) for name in refused]

    @pytest.mark.parametrize("node", ["n1", "n2"])
    def test_waiting_mtgpupod_gets_its_card_once_a_gpuid_is_freed(self, bounded: Rig, node: str) -> None:
        """Also where that one is on another node, on which nothing else happens."""
        create(bounded, "a", "x", "n1")
        create(bounded, "b", "y", "n1")
        bounded.settle()
        create(bounded, "c", "z", node)
        bounded.settle()
        assert bound(bounded, "c")[1] == "TooManyGPUIDs"
        bounded.delete("a")
        bounded.settle()
        assert bound(bounded, "c")[:2] == ("True", "Bound")

    def test_lowered_limit_takes_no_cards_away(self, bounded: Rig) -> None:
        create(bounded, "a", "x", "n1")
        create(bounded, "b", "y", "n2")
        bounded.settle()
        bounded.settings = load_settings("dialects: {mtgpu: {occupyPriorityClass: '', maxGPUIDsPerNamespace: 1}}")
        bounded.restart()
        create(bounded, "c", "y", "n2")
        create(bounded, "d", "z", "n2")
        bounded.settle()
        reasons = [bound(bounded, name)[1] for name in "abcd"]
        assert reasons == ["Bound", "Bound", "Bound", "TooManyGPUIDs"]

    def test_admission_with_outdated_counts_of_other_nodes_is_rejected(self, bounded: Rig) -> None:
        """What was seen of other nodes is checked again with the decision."""
        state = bounded.scheduler.state
        create(bounded, "a", "x", "n1")
        bounded.settle()
        version = state.mtgpupods.snapshot("n2").node.version
        for stale in ({"default": 0}, {"default": 2}):
            assert not state.mtgpupods.admit("n2", (), version, GpuidLimit(2, stale), ("default",))
        assert state.mtgpupods.admit("n2", (), version, GpuidLimit(2, {"default": 1}))

    def test_limit_below_one_is_invalid(self) -> None:
        with pytest.raises(
            BadObject, match=r"maxGPUIDsPerNamespace: Input should be greater than or equal to 1, not 0"
        ):
            load_settings("dialects: {mtgpu: {maxGPUIDsPerNamespace: 0}}")


NODES = st.sampled_from(["n1", "n2"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from(["default", "other"]), st.sampled_from("vwxyz"), NODES),
        st.tuples(st.just("delete"), st.integers(0, 8)),
        st.tuples(st.sampled_from(["hear", "control", "round", "restart", "take over"])),
    ),
    min_size=12,
    max_size=30,
)


@examples(5)
@given(ACTIONS)
def test_property_namespace_never_uses_more_gpuids_than_its_limit(actions: list[tuple[Any, ...]]) -> None:
    rig = Rig(("n1", 3, False), ("n2", 3, False))
    rig.settings = TWO
    rig.restart()
    for i, (what, *more) in enumerate(actions):
        if what == "create":
            create(rig, f"m{i}", more[1], more[2], more[0])
        elif what == "delete":
            items = [raw["metadata"] for raw in rig.items() if "deletionTimestamp" not in raw["metadata"]]
            for meta in items[more[0] : more[0] + 1]:
                rig.cluster.delete(f"{items_path(meta['namespace'])}/{meta['name']}")
        elif what == "hear":
            rig.scheduler.hear(ITEMS)
        else:
            {"control": rig.control, "round": rig.round, "restart": rig.restart, "take over": rig.take_over}[what]()
        assert all(len(used) <= 2 for used in in_use(rig).values())
    rig.settle()
    assert all(len(used) <= 2 for used in in_use(rig).values())
    for raw in rig.items():
        # One that waits for this reason does so rightly.
        rows = (raw.get("status") or {}).get("conditions") or ()
        if any(row["reason"] == "TooManyGPUIDs" for row in rows):
            assert len(in_use(rig)[raw["metadata"]["namespace"]]) == 2
