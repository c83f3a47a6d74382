"""kube-scheduler's extender calls for pods whose claims request MIG instances."""

from typing import Any

import pytest
from werkzeug.test import Client

from mgpu.model.resource_claims import MARK
from tests import builders as b
from tests.scheduler.api.test_mig_claim_webhook import OF_CARDS, OF_MIG, Raw, labelled, mig
from tests.scheduler.claim_objects import allocate, claim, device_class, result, submit, waiting_pod
from tests.scheduler.fake import Replica, admitted, admitted_claims, clients, cluster

NODES = ["n1", "n2", "n3"]


@pytest.fixture
def replica() -> Replica:
    """Two nodes with a card for MIG instances, and one with a card for shares."""
    api = cluster(("n1", 1), ("n2", 1), ("n3", 1))
    for node in ("n1", "n2"):
        api.put("nodes", labelled(node))
    api.put("deviceclasses", device_class("mgpu-mig", OF_MIG))
    api.put("deviceclasses", device_class("mgpu", OF_CARDS))
    found = Replica(api)
    api.admit = admitted(found)
    api.admit_claim = admitted_claims(found)
    found.deliver()
    return found


@pytest.fixture
def client(replica: Replica) -> Client:
    return clients(replica)[1]


def pod(replica: Replica, name: str, *requests: Raw, **more: Any) -> Raw:
    """Create a claim, and return the pod that uses it, which the webhook has marked."""
    submit(replica.api, claim(name, *(requests or (mig(),)), **more))
    replica.deliver()
    raw = waiting_pod(f"p-{name}", name)
    raw["spec"]["containers"][0]["resources"] = {"limits": {MARK: "0"}, "requests": {MARK: "0"}}
    return raw


def hold(replica: Replica, name: str, profile: str, device: str, node: str = "n1") -> None:
    submit(replica.api, claim(name, mig(profile=profile)))
    replica.deliver()
    allocate(replica.api, name, result(device, node=node))


def asked(client: Client, raw: Raw, names: list[str] = NODES) -> Any:
    return client.post("/filter", json={"Pod": raw, "NodeNames": names}).json


def points(client: Client, raw: Raw, names: list[str]) -> dict[str, int]:
    rows = client.post("/prioritize", json={"Pod": raw, "NodeNames": names}).json
    assert rows is not None
    return {row["Host"]: row["Score"] for row in rows}


def test_nodes_without_room_are_rejected_with_the_reason(replica: Replica, client: Client) -> None:
    """The reservation of a claim counts, although kube-scheduler counts the claim elsewhere until it is written."""
    hold(replica, "x", "7g.80gb", "card-0-mig-7g-80gb-0")
    found = asked(client, pod(replica, "a"))
    assert found["NodeNames"] == ["n2"]
    assert found["FailedAndUnresolvableNodes"]["n1"] == (
        "insufficient GPU (1 card: 1 7g.80gb in use at 0: no room for 2g.20gb)"
    )
    assert "no cards whose MIG instances claims can get" in found["FailedAndUnresolvableNodes"]["n3"]


def test_annotations_of_the_claim_count(replica: Replica, client: Client) -> None:
    raw = pod(replica, "a", annotations={"mgpu.io/card-uuids": "GPU-n2-0"})
    assert asked(client, raw)["NodeNames"] == ["n2"]


def test_card_that_is_partitioned_already_has_the_most_points(replica: Replica, client: Client) -> None:
    hold(replica, "x", "1g.10gb", "card-0-mig-1g-10gb-6", node="n2")
    assert points(client, pod(replica, "a"), ["n1", "n2"]) == {"n1": 0, "n2": 10}


def test_equal_nodes_have_equal_points(replica: Replica, client: Client) -> None:
    assert points(client, pod(replica, "a"), ["n1", "n2"]) == {"n1": 10, "n2": 10}


def test_first_alternative_that_fits_counts(replica: Replica, client: Client) -> None:
    large, small = (mig(profile=profile)["exactly"] | {"name": profile[0]} for profile in ("7g.80gb", "1g.10gb"))
    raw = pod(replica, "a", {"name": "gpu", "firstAvailable": [large, small]})
    for node in ("n1", "n2"):
        hold(replica, node, "3g.40gb", "card-0-mig-3g-40gb-4", node=node)
    assert asked(client, raw)["NodeNames"] == ["n1", "n2"]


def test_selector_that_mgpu_cannot_evaluate_rejects_no_node(replica: Replica, client: Client) -> None:
    """kube-scheduler can evaluate it, and its choice is kept."""
    wanted = mig()
    wanted["exactly"]["selectors"].append({"cel": {"expression": "cel.unknownFunction(device)"}})
    assert asked(client, pod(replica, "a", wanted), ["n1", "n2"])["NodeNames"] == ["n1", "n2"]


def test_pods_without_claims_for_instances_are_not_affected(client: Client) -> None:
    assert asked(client, b.pod("p"))["NodeNames"] == NODES
    assert set(points(client, b.pod("p"), NODES).values()) == {0}
