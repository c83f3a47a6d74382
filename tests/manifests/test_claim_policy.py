"""The expressions of manifests/components/dra, evaluated by the CEL project's own library."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import yaml

from mgpu.model.mig_resource_slices import PublishedMigCard, count_mig_slices, make_mig_slices
from mgpu.model.resource_claims import DRIVER, PREPARED, REPAIR
from mgpu.model.resource_slices import CORDONED, WAKE, PublishedCard, make_slice
from playground.apiserver.patches import merge
from playground.installation import MANIFESTS
from tests import builders as b
from tests.manifests import policy_evaluation
from tests.manifests.policy_evaluation import Raw, evaluated, policies

FOLDER = MANIFESTS / "components/dra"
POLICIES = policies(FOLDER / "policy.yaml")
AGENT = "system:serviceaccount:mgpu-system:mgpu-deviceplugin"
SCHEDULER = "system:serviceaccount:mgpu-system:mgpu-scheduler"
OWN = "own"
OTHER_DRIVER = "nics.example.com"


def denials(
    policy: str, new: Raw | None, old: Raw | None, *, user: str = SCHEDULER, node: str | None = None
) -> tuple[str, ...]:
    return policy_evaluation.denials(POLICIES[policy], new, old, user=user, node=node)


def result(driver: str = DRIVER, pool: str = OWN, device: str = "card-0") -> Raw:
    return {"request": "gpu", "driver": driver, "pool": pool, "device": device, "shareID": "s"}


def claim(*results: Raw, **annotations: str) -> Raw:
    """Return a claim, which is allocated if it has results."""
    meta = {"name": "c", "namespace": "ml", "uid": "u", "resourceVersion": "1", "annotations": annotations}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "mgpu", "count": 1}}]}}
    status = {"allocation": {"devices": {"results": [*results]}}, "reservedFor": [{"name": "p"}]} if results else {}
    return {"metadata": meta, "spec": spec, "status": status}


def locked(*results: Raw) -> Raw:
    return claim(*results, **{REPAIR: "{}"})


def changed(raw: Raw, patch: Raw) -> Raw:
    return dict(merge(copy.deepcopy(raw), patch))


def reported(raw: Raw, *devices: Raw) -> Raw:
    return changed(raw, {"status": {"devices": [*devices]}})


def delivered(driver: str = DRIVER, pool: str = OWN, **more: Any) -> Raw:
    """Return an entry of `status.devices`."""
    condition = {"type": PREPARED, "status": "True", "reason": "Delivered", "message": ""}
    data = {"uuid": "GPU-0", "index": 0, "corePercent": 30, "memoryBytes": 1 << 33}
    place = {"driver": driver, "pool": pool, "device": "card-0", "shareID": "s"}
    return {**place, "conditions": [condition], "data": data, **more}


def slice_of(node: str = OWN) -> Raw:
    cards = [PublishedCard(card, 1000, card.memory, (CORDONED,)) for card in b.cards(2, node=node)]
    return make_slice(node, f"uid-{node}", cards, 1, {WAKE: "2026-01-01T00:00:00.000+00:00"})


# Slices


def test_agent_publishes_the_slice_of_its_node() -> None:
    policy = "mgpu-deviceplugin-resourceslices"
    own = slice_of()
    later = changed(own, {"spec": {"pool": {"generation": 2}, "devices": own["spec"]["devices"][:1]}})
    for new, old in ((own, None), (later, own), (None, own)):
        assert denials(policy, new, old, user=AGENT, node=OWN) == ()


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ({"metadata": {"name": "other-gpu.mgpu.io"}}, "no others"),
        ({"metadata": {"name": "other-gpu.mgpu.io-mig-00"}}, "no others"),
        ({"spec": {"nodeName": "other"}}, "on its own node"),
        ({"spec": {"nodeName": None, "allNodes": True}}, "on its own node"),
        ({"spec": {"driver": OTHER_DRIVER}}, "its own driver"),
        ({"spec": {"pool": {"name": "other"}}}, "one pool"),
        ({"spec": {"pool": {"resourceSliceCount": 41}}}, "one pool"),
        ({"spec": {"sharedCounters": [{"name": "card-0"}]}}, "only in slices for them"),
        ({"metadata": {"name": f"{OWN}-gpu.mgpu.io-mig-0"}}, "no others"),
        ({"metadata": {"name": f"{OWN}-gpu.mgpu.io-mig-00-x"}}, "no others"),
        ({"spec": {"devices": [{"name": "card-0", "consumesCounters": []}]}}, "is a card"),
        ({"spec": {"devices": [{"name": "gpu-0"}]}}, "is a card"),
        ({"spec": {"devices": [{"name": "card-0", "bindingConditions": ["a"]}]}}, "is a card"),
        ({"spec": {"devices": [{"name": f"card-{i}"} for i in range(65)]}}, "at most 64"),
        ({"metadata": {"labels": {"a": "b"}}}, "no metadata"),
        ({"metadata": {"finalizers": ["a/b"]}}, "no metadata"),
        ({"metadata": {"annotations": {"a": "b"}}}, "no annotations"),
        ({"metadata": {"annotations": {WAKE: "x" * 65}}}, "no annotations"),
        ({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": OWN, "uid": "u"}]}}, "owner"),
        ({"more": "x"}, "changes nothing"),
    ],
)
def test_agent_publishes_nothing_else(patch: Raw, why: str) -> None:
    policy = "mgpu-deviceplugin-resourceslices"
    own = slice_of()
    wrong = changed(own, patch)
    for old in (None, own):
        assert any(why in message for message in denials(policy, wrong, old, user=AGENT, node=OWN))


def test_agent_publishes_mig_instances_with_their_counters() -> None:
    policy = "mgpu-deviceplugin-resourceslices"
    cards = [PublishedMigCard(card) for card in b.cards(9, node=OWN)]
    slices = make_mig_slices(OWN, f"uid-{OWN}", cards, 1, 1 + count_mig_slices(cards))
    for one in slices:
        for new, old in ((one, None), (one, one), (None, one)):
            assert denials(policy, new, old, user=AGENT, node=OWN) == ()


def test_agent_publishes_no_other_counters() -> None:
    policy = "mgpu-deviceplugin-resourceslices"
    counters, devices, *_ = make_mig_slices(OWN, f"uid-{OWN}", [PublishedMigCard(b.card(0, node=OWN))], 1, 3)
    foreign = changed(counters, {"spec": {"sharedCounters": [{"name": "nic-0", "counters": {}}]}})
    misplaced = changed(devices, {"spec": {"sharedCounters": counters["spec"]["sharedCounters"]}})
    for wrong in (foreign, misplaced):
        assert any("counters" in message for message in denials(policy, wrong, None, user=AGENT, node=OWN))


def test_agent_neither_creates_nor_deletes_slices_of_other_nodes() -> None:
    policy = "mgpu-deviceplugin-resourceslices"
    others = changed(slice_of(), {"spec": {"driver": OTHER_DRIVER}})
    for new, old in ((slice_of("other"), None), (None, slice_of("other")), (None, others)):
        assert denials(policy, new, old, user=AGENT, node=OWN)
    named = changed(slice_of(), {"metadata": {"name": "of-a-former-version"}, "spec": {"sharedCounters": []}})
    assert denials(policy, None, named, user=AGENT, node=OWN) == ()
    assert denials(policy, slice_of(""), None, user=AGENT)
    assert denials(policy, slice_of(), None, user=AGENT)


def test_scheduler_wakes_pods_by_an_annotation_of_a_slice_and_changes_nothing_else() -> None:
    policy = "mgpu-scheduler-resourceslices"
    own = slice_of()
    assert denials(policy, changed(own, {"metadata": {"annotations": {WAKE: "later"}}}), own) == ()
    patches: list[Raw] = [
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"annotations": {WAKE: "x" * 65}}},
        {"metadata": {"labels": {"a": "b"}}},
        {"spec": {"devices": []}},
        {"spec": {"pool": {"generation": 9}}},
    ]
    for patch in patches:
        assert denials(policy, changed(own, patch), own), patch
    others = changed(own, {"spec": {"driver": OTHER_DRIVER}})
    assert denials(policy, changed(others, {"metadata": {"annotations": {WAKE: "later"}}}), others)
    assert denials(policy, own, None)
    assert denials(policy, None, own)


# Claims


def test_agent_reports_what_it_has_delivered() -> None:
    policy = "mgpu-deviceplugin-resourceclaims"
    nic = delivered(OTHER_DRIVER, "nics")
    before = reported(claim(result(), result(OTHER_DRIVER, "nics")), nic)
    after = reported(before, nic, delivered())
    for new, old in ((after, before), (before, after), (before, before)):
        assert denials(policy, new, old, user=AGENT, node=OWN) == ()


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (reported(claim(result()), delivered(pool="other")), "no devices of other"),
        (reported(claim(result()), delivered(OTHER_DRIVER)), "no devices of other"),
        (reported(claim(result()), delivered(networkData={"ips": ["10.6.6.6/8"]})), "nothing about a device but"),
        (reported(claim(result()), delivered(data={"a": "b"})), "nothing as data"),
        (reported(claim(result()), delivered(data={"uuid": "x" * 129})), "nothing as data"),
        (claim(result(device="card-1")), "no allocation"),
        (claim(), "no allocation"),
        (changed(claim(result()), {"status": {"reservedFor": []}}), "who may use it"),
        (locked(result()), "no metadata"),
        (changed(claim(result()), {"metadata": {"finalizers": []}}), "no metadata"),
        (changed(claim(result()), {"spec": {"devices": {"requests": []}}}), "no spec"),
        (None, "neither creates nor deletes"),
    ],
)
def test_agent_changes_nothing_else_of_claims(new: Raw | None, why: str) -> None:
    policy = "mgpu-deviceplugin-resourceclaims"
    assert any(why in message for message in denials(policy, new, claim(result()), user=AGENT, node=OWN))


def test_agent_needs_a_token_that_is_bound_to_a_node() -> None:
    old = claim(result())
    assert denials("mgpu-deviceplugin-resourceclaims", reported(old, delivered(pool="")), old, user=AGENT)
    assert denials("mgpu-deviceplugin-resourceclaims", claim(result()), None, user=AGENT, node=OWN)


def test_scheduler_replaces_an_allocation_in_the_writes_of_a_repair() -> None:
    """As `scheduler.claims.repair` does: lock, remove, allocate, unlock."""
    policy = "mgpu-scheduler-resourceclaims"
    failed = changed(delivered(), {"conditions": [{"type": PREPARED, "status": "False"}]})
    steps = [
        reported(claim(result()), failed),
        reported(locked(result()), failed),
        locked(),
        locked(result(device="card-1")),
        claim(result(device="card-1")),
    ]
    for old, new in pairwise(steps):
        assert denials(policy, new, old) == ()


@pytest.mark.parametrize(
    ("new", "old", "why"),
    [
        (claim(), claim(result()), "only while mgpu.io/repair locks it"),
        (claim(result()), claim(), "only while mgpu.io/repair locks it"),
        (locked(), claim(result()), "only while mgpu.io/repair locks it"),
        (locked(), locked(result(OTHER_DRIVER)), "no allocation without devices"),
        (locked(result(OTHER_DRIVER)), locked(), "no allocation without devices"),
        (locked(), reported(locked(result()), delivered()), "delivered"),
        (reported(locked(result()), delivered()), locked(result()), "no status"),
        (locked(result()), reported(locked(result()), delivered()), "no status"),
        (claim(result(), a="b"), claim(result()), "no annotations"),
        (changed(claim(), {"metadata": {"finalizers": ["a/b"]}}), claim(), "no metadata"),
        (changed(claim(), {"metadata": {"ownerReferences": []}}), claim(), "no metadata"),
        (changed(claim(), {"spec": {"devices": {"requests": []}}}), claim(), "no spec"),
        (claim(), None, "neither creates nor deletes"),
        (None, claim(), "neither creates nor deletes"),
    ],
)
def test_scheduler_changes_nothing_else_of_claims(new: Raw | None, old: Raw | None, why: str) -> None:
    assert any(why in message for message in denials("mgpu-scheduler-resourceclaims", new, old))


@pytest.mark.parametrize("user", [AGENT, "system:admin", "system:serviceaccount:ml:default"])
def test_nobody_but_the_scheduler_writes_the_annotation_of_a_repair(user: str) -> None:
    policy = "mgpu-repair-annotation"
    other = {"metadata": {"annotations": {REPAIR: "other"}}}
    template = {"metadata": {"name": "t"}, "spec": {"metadata": {"annotations": {REPAIR: "{}"}}, "spec": {}}}
    for new, old in ((locked(), None), (locked(), claim()), (claim(), locked()), (changed(locked(), other), locked())):
        assert denials(policy, new, old, user=user)
        assert denials(policy, new, old, user=SCHEDULER) == ()
    assert denials(policy, template, None, user=user)
    assert denials(policy, {"metadata": {"name": "t"}, "spec": {"spec": {}}}, None, user=user) == ()
    for same in (locked(result()), claim(result()), {"metadata": {"name": "c"}, "spec": {}}):
        assert denials(policy, same, same, user=user) == ()
    assert denials(policy, claim(a="b"), None, user=user) == ()


def test_other_users_are_not_held_to_the_policies() -> None:
    for policy in POLICIES.keys() - {"mgpu-repair-annotation"}:
        assert denials(policy, None, claim(result()), user="system:kube-scheduler") == ()


# The webhook


@pytest.mark.parametrize(
    ("new", "old", "called"),
    [
        (claim(result()), claim(), True),
        (claim(result(OTHER_DRIVER), result()), claim(), True),
        (claim(result()), {"metadata": {}, "spec": {}}, True),
        (claim(result()), claim(result()), False),
        (claim(), claim(result()), False),
        (claim(result(OTHER_DRIVER)), claim(), False),
        (claim(), claim(), False),
        ({"metadata": {}, "spec": {}, "status": {"allocation": {}}}, claim(), False),
        ({"metadata": {}, "spec": {}, "status": {"allocation": {"devices": {}}}}, {"metadata": {}, "spec": {}}, False),
    ],
)
def test_webhook_is_called_for_new_allocations_with_cards(new: Raw, old: Raw, called: bool) -> None:
    configuration = yaml.safe_load((FOLDER / "webhook.yaml").read_text())
    (hook,) = configuration["webhooks"]
    data = {"object": new, "oldObject": old}
    assert all(evaluated(condition["expression"], data) for condition in hook["matchConditions"]) is called
    assert (hook["failurePolicy"], hook["matchPolicy"]) == ("Fail", "Equivalent")
