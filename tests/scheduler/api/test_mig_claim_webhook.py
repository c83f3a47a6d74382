"""The admission of claims for MIG instances: kube-scheduler's instances are replaced by the best ones that are free."""

from dataclasses import replace
from typing import Any, cast

import pytest

from mgpu.kube import Api
from mgpu.model.device_object import write_device
from mgpu.model.node_slices import EXISTING, LABEL
from mgpu.model.pods import Node
from mgpu.model.resource_claims import SLICES, DeviceRequest
from mgpu.model.resource_slices import WAKE, slice_name
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.effort_budgets import ALLOWANCE, EffortBudgets
from tests import builders as b
from tests.scheduler.claim_objects import (
    allocate,
    claim,
    denial,
    device_class,
    devices,
    request,
    resource_slice,
    result,
    submit,
    waiting_pod,
)
from tests.scheduler.cluster.objects import record
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, admitted, admitted_claims, cluster

Raw = dict[str, Any]
OF_MIG = 'device.driver == "gpu.mgpu.io" && device.attributes["gpu.mgpu.io"].?type.orValue("") == "mig"'
OF_CARDS = 'device.driver == "gpu.mgpu.io" && device.attributes["gpu.mgpu.io"].?type.orValue("") != "mig"'


def labelled(node: str = "n1") -> Raw:
    return b.node(node, labels={LABEL: "mig-claims"})


def mig(name: str = "gpu", profile: str = "2g.20gb", **more: Any) -> Raw:
    """A request for MIG instances of a profile."""
    selector = {"cel": {"expression": f'device.attributes["gpu.mgpu.io"].profile == "{profile}"'}}
    return {"name": name, "exactly": {"deviceClassName": "mgpu-mig", "selectors": [selector], **more}}


@pytest.fixture
def replica() -> Replica:
    """A node with one card for shares, and one with two cards for MIG instances."""
    api = cluster(("n1", 2), ("n2", 1))
    api.put("nodes", labelled())
    api.put("deviceclasses", device_class("mgpu-mig", OF_MIG))
    api.put("deviceclasses", device_class("mgpu", OF_CARDS))
    for node in ("n1", "n2"):
        api.put("resourceslices", resource_slice(node))
    found = Replica(api)
    api.admit = admitted(found)
    api.admit_claim = admitted_claims(found)
    found.deliver()
    return found


def given(replica: Replica, name: str, *requests: Raw, **more: Any) -> None:
    submit(replica.api, claim(name, *(requests or (mig(),)), **more))
    replica.deliver()


def test_claim_gets_the_best_instance_of_the_profile(replica: Replica) -> None:
    given(replica, "a")
    written = allocate(replica.api, "a", result("card-1-mig-2g-20gb-0"))
    assert devices(written) == ["card-0-mig-2g-20gb-4"]


def test_second_claim_never_gets_what_the_first_has(replica: Replica) -> None:
    for name in "abcdefg":
        given(replica, name, mig(profile="3g.40gb"))
    taken: list[str] = []
    for name in "abcd":
        taken += devices(allocate(replica.api, name, result("card-0-mig-3g-40gb-0")))
    assert sorted(taken) == [f"card-{card}-mig-3g-40gb-{start}" for card in (0, 1) for start in (0, 4)]
    error = denial(replica.api, "e", result("card-0-mig-3g-40gb-0"))
    assert error.status == 403
    assert "2 cards: 2 3g.40gb in use at 0, 4: no room for 3g.40gb" in str(error)


def test_decision_is_the_same_for_a_repeated_call(replica: Replica) -> None:
    given(replica, "a")
    first = devices(allocate(replica.api, "a", result("card-1-mig-2g-20gb-0"), dry_run=True))
    allocate(replica.api, "a", result("card-1-mig-2g-20gb-0"))
    given(replica, "b")
    assert devices(replica.api.claim("a")) == first
    assert devices(allocate(replica.api, "b", result("card-0-mig-2g-20gb-4"))) != first


def test_holding_stays_when_the_watch_delivers_and_ends_with_the_claim(replica: Replica) -> None:
    given(replica, "a", mig(profile="7g.80gb"))
    given(replica, "b", mig(profile="7g.80gb"))
    given(replica, "c", mig(profile="7g.80gb"))
    allocate(replica.api, "a", result("card-0-mig-7g-80gb-0"))
    allocate(replica.api, "b", result("card-0-mig-7g-80gb-0"))
    replica.deliver()
    denial(replica.api, "c", result("card-0-mig-7g-80gb-0"))
    replica.api.remove("resourceclaims", "a")
    replica.deliver()
    assert devices(allocate(replica.api, "c", result("card-1-mig-7g-80gb-0"))) == ["card-0-mig-7g-80gb-0"]


def test_several_requests_get_instances_that_exist_together(replica: Replica) -> None:
    given(replica, "a", mig("big", "4g.40gb"), mig("small", "1g.10gb", count=2))
    results = [result("card-0-mig-4g-40gb-0", "big"), *(result(f"card-0-mig-1g-10gb-{i}", "small") for i in (5, 6))]
    written = devices(allocate(replica.api, "a", *results))
    assert written == ["card-0-mig-4g-40gb-0", "card-0-mig-1g-10gb-5", "card-0-mig-1g-10gb-6"]


def test_constraint_keeps_instances_on_one_card(replica: Replica) -> None:
    given(replica, "x", mig(profile="4g.40gb"))
    allocate(replica.api, "x", result("card-0-mig-4g-40gb-0"))
    given(replica, "a", mig(profile="3g.40gb", count=2), constraints=({"matchAttribute": "gpu.mgpu.io/uuid"},))
    written = allocate(replica.api, "a", *(result(f"card-1-mig-3g-40gb-{start}") for start in (0, 4)))
    assert devices(written) == ["card-1-mig-3g-40gb-0", "card-1-mig-3g-40gb-4"]


def test_selector_of_the_card_holds_for_its_instances(replica: Replica) -> None:
    selector = {"cel": {"expression": 'device.attributes["gpu.mgpu.io"].index == 1'}}
    wanted = mig()
    wanted["exactly"]["selectors"].append(selector)
    given(replica, "a", wanted)
    assert devices(allocate(replica.api, "a", result("card-1-mig-2g-20gb-0"))) == ["card-1-mig-2g-20gb-4"]


def test_annotation_limits_the_cards(replica: Replica) -> None:
    given(replica, "a", annotations={"mgpu.io/card-uuids": "GPU-n1-1"})
    assert devices(allocate(replica.api, "a", result("card-0-mig-2g-20gb-0"))) == ["card-1-mig-2g-20gb-4"]


def test_node_without_the_label_gives_no_instances(replica: Replica) -> None:
    given(replica, "a")
    error = denial(replica.api, "a", result("card-0-mig-2g-20gb-0", node="n2"))
    assert "no cards whose MIG instances claims can get" in str(error)


def test_shares_are_not_given_on_the_node_with_the_label(replica: Replica) -> None:
    given(replica, "a", request(cores=30, memory="8Gi"))
    error = denial(replica.api, "a", result("card-0", cores="30", memory="8Gi"))
    assert error.status == 403


def test_card_that_a_pod_holds_from_before_the_label_gives_no_instances(replica: Replica) -> None:
    replica.api.put("nodes", b.node("n1"))
    replica.deliver()
    replica.api.put("pods", b.share("p", 30, annotations=record("0"), node="n1"))
    replica.api.put("nodes", labelled())
    replica.deliver()
    given(replica, "a", mig(profile="7g.80gb"))
    assert devices(allocate(replica.api, "a", result("card-0-mig-7g-80gb-0"))) == ["card-1-mig-7g-80gb-0"]


def test_card_with_instances_is_given_to_nobody_when_the_label_is_removed(replica: Replica) -> None:
    given(replica, "a")
    allocate(replica.api, "a", result("card-0-mig-2g-20gb-4"))
    replica.deliver()
    replica.api.put("nodes", b.node("n1"))
    replica.deliver()
    states = {state.card.index: state for state in replica.state.node_snapshot("n1", "").cards}
    assert states[0].core_free == 0
    assert states[1].core_free == 1000


def test_waiting_pod_is_woken_if_its_instances_fit(replica: Replica) -> None:
    given(replica, "a")
    replica.api.put("pods", waiting_pod("p", "a"))
    replica.deliver()
    assert woken(replica) == "n1"


def test_waiting_pod_is_not_woken_while_other_claims_have_all_instances(replica: Replica) -> None:
    for name in "abc":
        given(replica, name, mig(profile="7g.80gb"))
    for name in "ab":
        allocate(replica.api, name, result("card-0-mig-7g-80gb-0"))
    replica.api.put("pods", waiting_pod("p", "c"))
    replica.deliver()
    assert woken(replica) is None


def test_allocation_that_overlaps_is_repaired(replica: Replica) -> None:
    """Two claims were allocated while the webhook was not installed."""
    for name in "ab":
        given(replica, name)
    decide, replica.api.admit_claim = replica.api.admit_claim, None
    for name in "ab":
        allocate(replica.api, name, result("card-0-mig-2g-20gb-4"))
    replica.api.admit_claim = decide
    replica.deliver()
    for _ in range(4):
        replica.claim_repair.work()
        replica.deliver()
    both = [*devices(replica.api.claim("a")), *devices(replica.api.claim("b"))]
    assert sorted(both) == ["card-0-mig-2g-20gb-2", "card-0-mig-2g-20gb-4"]


def woken(replica: Replica) -> str | None:
    """Return the node of the slice that the waker changes in ten seconds, or None."""
    replica.claim_waker.work()
    for _ in range(10):
        replica.clock.now += 1
        replica.claim_waker.work()
    for node in ("n1", "n2"):
        meta = replica.api.get(f"{SLICES}/{slice_name(node)}")["metadata"]
        if WAKE in (meta.get("annotations") or {}):
            return node
    return None


def h100_node(api: FakeApi, name: str) -> None:
    """Add a node whose cards are of another model than those of `replica`."""
    card = replace(b.card(0, node=name), model="NVIDIA H100 80GB HBM3")
    api.put("nodes", labelled(name))
    api.put("devices", write_device(Node(name), "", (card,)))


def test_class_for_one_model_is_for_instances_beside_cards_of_other_models(replica: Replica) -> None:
    h100_node(replica.api, "n3")
    of_h100 = f'{OF_MIG} && device.attributes["gpu.mgpu.io"].model == "NVIDIA H100 80GB HBM3"'
    replica.api.put("deviceclasses", device_class("h100", of_h100))
    replica.deliver()
    assert replica.claim_decider.is_for_instances(DeviceRequest("gpu", "h100"))
    assert not replica.claim_decider.is_for_cards(DeviceRequest("gpu", "h100"))


def large(count: int = 1) -> Raw:
    """A request for instances of any profile with at least 30 GiB."""
    exactly = {"deviceClassName": "mgpu-mig", "count": count, "capacity": {"requests": {"memory": "30Gi"}}}
    return {"name": "gpu", "exactly": exactly}


def assessed(replica: Replica, name: str) -> str | None:
    found = replica.state.claims.named("default", name)
    assert found is not None
    rejection = replica.claim_decider.assess(found, {"gpu"}, replica.state.node_snapshot("n1", found.uid))
    return None if rejection is None else str(rejection)


def test_amounts_of_a_request_without_a_profile_count_before_its_allocation(replica: Replica) -> None:
    given(replica, "a", large(4))
    given(replica, "b", large(5))
    assert assessed(replica, "a") is None
    assert assessed(replica, "b") is not None


def test_claim_for_more_devices_than_an_allocation_can_have_is_rejected_without_a_search(replica: Replica) -> None:
    given(replica, "a", mig(count=1000))
    assert assessed(replica, "a") == "the claim requests more than 32 devices"


def test_annotation_limits_the_cards_even_if_a_selector_cannot_be_evaluated(replica: Replica) -> None:
    wanted = mig()
    wanted["exactly"]["selectors"].append({"cel": {"expression": "cel.unknownFunction(device)"}})
    given(replica, "a", wanted, annotations={"mgpu.io/card-uuids": "GPU-n1-1"})
    denial(replica.api, "a", result("card-0-mig-2g-20gb-0"))
    assert devices(allocate(replica.api, "a", result("card-1-mig-2g-20gb-0"))) == ["card-1-mig-2g-20gb-0"]


def test_long_search_for_instances_is_charged_to_the_namespace(replica: Replica) -> None:
    wanted = [mig(f"r{i}", "1g.10gb") for i in range(16)]  # Two cards have 14 of these.
    for i, one in enumerate(wanted):
        # Different sets of allowed instances, so that the results are not interchangeable.
        expression = f'device.attributes["gpu.mgpu.io"].start != {i % 7}'
        one["exactly"]["selectors"].append({"cel": {"expression": expression}})
    given(replica, "a", *wanted)
    budgets = EffortBudgets()
    decider = ClaimDecider(replica.state, cast(Api, replica.api), SETTINGS, budgets)
    found = replica.state.claims.named("default", "a")
    assert found is not None
    snapshot = replica.state.node_snapshot("n1", found.uid)
    assert decider.assess(found, {f"r{i}" for i in range(16)}, snapshot) is not None
    assert budgets.remaining("default") < ALLOWANCE


def report(replica: Replica, cards: str) -> None:
    """Let the agent of n1 report its cards, and the instances that are not of claims."""
    replica.api.put("nodes", {**labelled(), "metadata": labelled()["metadata"] | {"annotations": {EXISTING: cards}}})
    replica.deliver()


def test_card_that_is_not_in_mig_mode_gives_no_instances(replica: Replica) -> None:
    report(replica, '{"cards": {"1": []}}')
    given(replica, "a")
    given(replica, "b", mig(profile="7g.80gb"))
    assert devices(allocate(replica.api, "a", result("card-0-mig-2g-20gb-4"))) == ["card-1-mig-2g-20gb-4"]
    error = denial(replica.api, "b", result("card-0-mig-7g-80gb-0"))
    assert "1 not in MIG mode" in str(error)


def test_place_of_an_instance_that_is_not_of_a_claim_is_given_to_nobody(replica: Replica) -> None:
    report(replica, '{"cards": {"0": [{"profile": "3g.40gb", "start": 4}], "1": []}}')
    given(replica, "a", mig(profile="2g.20gb"))
    given(replica, "b", mig(profile="7g.80gb"))
    assert devices(allocate(replica.api, "a", result("card-1-mig-2g-20gb-4"))) == ["card-0-mig-2g-20gb-2"]
    assert devices(allocate(replica.api, "b", result("card-0-mig-7g-80gb-0"))) == ["card-1-mig-7g-80gb-0"]
    assert replica.state.node_snapshot("n1", "").other_devices == ()
