"""What `mgpu explain` says about ResourceClaims, and about pods that use them."""

from typing import Any

import pytest

from mgpu.kube import Api
from mgpu.model.resource_claims import PREPARED, REPAIR
from mgpu.presentation.explanations import Explanation
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.claim_explanation import KIND
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.explanation import Explainer
from tests import builders as b
from tests.claim_objects import CLASS, Raw, claim
from tests.scheduler.api.commands.test_live_overview import device

SETTINGS = load_settings("dra: {enabled: true}")
RECORD = {"vke.volcengine.com/gpu-index-container-c": "0", "vke.volcengine.com/assumed": "true"}


class World:
    """Two nodes with two cards each; a pod has most of card 0 of n1."""

    def __init__(self, *claims: Raw, pods: tuple[Raw, ...] = ()) -> None:
        self.state = ClusterCache(SETTINGS)
        self.state.claims.class_changed(CLASS)
        holder = b.share("holder", 80, node="n1", phase="Running", annotations=RECORD)
        for name in ("n1", "n2"):
            self.state.node_changed(b.node(name))
            self.state.device_changed(device(name))
        for raw in (holder, *pods):
            self.state.pod_changed(raw)
        for raw in claims:
            self.state.claims.claim_changed(raw)

    def explain(self, raw: Raw, *selected: str) -> Explanation:
        api: Any = Api
        decider = ClaimDecider(self.state, api, SETTINGS, EffortBudgets(sleep=lambda _: None))
        kind = raw.get("kind", "Pod")
        return Explainer(self.state, SETTINGS, claims=decider).object(kind, raw, ["n1", "n2"], selected)


def user_of(*claims: str, node: str = "") -> Raw:
    raw = b.pod("user", {"name": "c", "image": "x"}, node=node)
    raw["metadata"]["namespace"] = "ml"
    raw["spec"]["resourceClaims"] = [{"name": name, "resourceClaimName": name} for name in claims]
    return raw


def test_claim_without_cards_names_the_nodes_and_the_reasons_against_their_cards() -> None:
    wanted = claim("train", cores=100, annotations={"mgpu.io/card-uuids": "GPU-n1-0,GPU-n1-1"})
    wanted["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2
    found = World(wanted).explain(wanted)
    assert (found.subject, found.status, found.dialect) == (f"{KIND} ml/train", "not allocated", "dra")
    assert found.request == (("gpu", "100% and 8.0 GiB of each of 2 cards"),)
    assert found.verdict[0] == "Its cards fit on none of 2 nodes with cards."
    assert {row.name: row.reason is None for row in found.nodes} == {"n1": False, "n2": False}
    (taken, free) = found.cards["n1"]
    assert taken.reason == "core 80 percent short"
    assert taken.holders == ("default/holder",)
    assert free.reason is None


def test_claim_that_fits_says_that_a_pod_is_needed() -> None:
    wanted = claim("small")
    found = World(wanted).explain(wanted)
    assert found.verdict[0] == "Its cards fit on 2 of 2 nodes with cards."
    assert "only for a pod that it places" in found.verdict[1]
    assert found.policy is not None
    assert found.policy.startswith("binpack")
    assert [row.name for row in World(wanted).explain(wanted, "n2").nodes] == ["n2"]


@pytest.mark.parametrize(
    ("prepared", "locked", "said"),
    [
        (False, False, "The agent has not delivered it yet."),
        (True, False, "The agent has delivered it."),
        (False, True, "mgpu is replacing its allocation"),
    ],
)
def test_allocated_claim_names_its_cards_and_whether_they_are_delivered(
    prepared: bool, locked: bool, said: str
) -> None:
    held = claim("held", 0, 1, annotations={REPAIR: "{}"} if locked else {})
    held["status"]["reservedFor"] = [{"resource": "pods", "name": "user", "uid": "u"}]
    if prepared:
        keys = ("driver", "pool", "device", "shareID")
        ((*_, row),) = (held["status"]["allocation"]["devices"]["results"],)
        condition = {"type": PREPARED, "status": "True"}
        held["status"]["devices"] = [{**{key: row[key] for key in keys}, "conditions": [condition]}]
    found = World(held).explain(held)
    assert found.status == "on n1, allocated for user"
    assert found.verdict[0].startswith(f"It is on cards 0, 1 of n1. {said}")
    assert [row.own for row in found.cards["n1"]] == [True, True]


def test_claim_of_another_driver_does_not_concern_mgpu() -> None:
    nic = claim("nic", device_class="nics")
    world = World(nic)
    world.state.claims.class_changed(
        {"metadata": {"name": "nics"}, "spec": {"selectors": [{"cel": {"expression": 'device.driver == "nics"'}}]}}
    )
    assert world.explain(nic).verdict == ("It requests no devices of mgpu's driver, so mgpu does not affect it.",)
    other = claim("other", 0, driver="nics")
    assert world.explain(other).verdict == ("It is allocated, and holds no card of mgpu's driver.",)


def test_claim_with_an_invalid_annotation_names_it() -> None:
    odd = claim("odd", annotations={"mgpu.io/card-policy": "fullest"})
    found = World().explain(odd)
    assert "mgpu.io/card-policy" in found.problems[0]


def test_pod_is_explained_by_its_open_claims() -> None:
    small, large = claim("small"), claim("large", cores=100, memory="79Gi", annotations={"mgpu.io/card-models": "B200"})
    pod = user_of("small", "large")
    found = World(small, large, pods=(pod,)).explain(pod)
    assert [name for name, _ in found.request] == ["large/gpu", "small/gpu"]
    assert found.verdict == ("The cards of its 2 claims fit on none of 2 nodes with cards.",)
    assert all(row.reason and row.reason.startswith("claim large: ") for row in found.nodes)


def test_bound_pod_names_the_cards_of_its_claims_and_holders_see_the_claim() -> None:
    held = claim("held", 1)
    pod = user_of("held", node="n1")
    world = World(held, pods=(pod,))
    assert world.explain(pod).verdict == (
        "Its ResourceClaim held is on card 1 of n1. The agent has not delivered it yet.",
    )
    holder = b.share("holder", 80, node="n1", phase="Running", annotations=RECORD)
    assert world.explain(holder).cards["n1"][1].holders == ("claim ml/held",)
    missing = claim("open")
    bound = user_of("open", node="n1")
    assert World(missing, pods=(bound,)).explain(bound).verdict == (
        "Its ResourceClaim open has no cards yet, although the pod is bound.",
    )


def test_pod_without_claims_of_mgpu_is_explained_as_before() -> None:
    pod = user_of("unknown")
    assert World(pods=(pod,)).explain(pod).verdict == ("It requests no GPU, so mgpu does not affect its scheduling.",)
