"""The seed's five examples, as written there (requests only), from the webhook to the annotation."""

import json
from typing import Any

import pytest

from mgpu import dialects
from mgpu.dialects.koordinator_record import ALLOCATED
from mgpu.model.cards import Card
from mgpu.model.gpu_requests import Rejection
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.pods import Node, read_pod
from mgpu.settings import load_settings
from scheduler.engine.node_assessment import assess, record
from tests.builders import GIB, cards, pod
from tests.mgpu.serving.reviews import patched
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create

DEFAULT = load_settings("")
OTHER = {"cpu": "4", "memory": "8Gi"}
RDMA = Card(0, "0000:1f:00.0", "", 0, minor=0, type="rdma")

EXAMPLES: dict[str, tuple[dict[str, str], list[int], dict[str, str]]] = {
    "Compatible with nvidia.com/gpu": (
        {"nvidia.com/gpu": "2"},
        [0, 1],
        {"gpu-core": "100", "gpu-memory": "8Gi", "gpu-memory-ratio": "100"},
    ),
    "Apply whole resources of GPU or part resources of GPU": (
        {"koordinator.sh/gpu": "50"},
        [2],
        {"gpu-core": "50", "gpu-memory": "4Gi", "gpu-memory-ratio": "50"},
    ),
    "Apply gpu-core and gpu-memory-ratio separately": (
        {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "60"},
        [3],
        {"gpu-core": "50", "gpu-memory": str(8 * GIB * 60 // 100), "gpu-memory-ratio": "60"},
    ),
    "Apply gpu-core and gpu-memory separately": (
        {"koordinator.sh/gpu-core": "60", "koordinator.sh/gpu-memory": "4Gi"},
        [4],
        {"gpu-core": "60", "gpu-memory": "4Gi", "gpu-memory-ratio": "50"},
    ),
    "Apply RDMA": ({"koordinator.sh/rdma": "100"}, [0], {"rdma": "100"}),
}


def admitted(name: str, requests: dict[str, str]) -> dict[str, Any]:
    raw = pod(name, {"name": "c", "image": "cuda", "resources": {"requests": {**requests, **OTHER}}})
    found = patched(raw, mutate(raw, DEFAULT).patch)
    assert validate_create(found, DEFAULT) == []
    return found


def decided(ledger: Ledger, raw: dict[str, Any]) -> Any:
    """The pod's `device-allocated`, and what is recorded is held; or why it has no devices."""
    read = read_pod(raw)
    request = dialects.read_request(read, DEFAULT)
    assert request is not None
    states = (*ledger.cards("n1"), *ledger.others("n1"))
    found = assess(request, Node("n1"), states, DEFAULT)
    if isinstance(found, Rejection):
        return found
    annotations = record(read, request, found, states, DEFAULT, 0)
    bound = read_pod({**raw, "metadata": {**raw["metadata"], "annotations": annotations}})
    shares = dialects.by_name(request.dialect).read_placement(bound, request)
    assert shares is not None
    ledger.hold(Holding(read.uid, read.namespace, read.name, "n1", request.dialect, shares))
    return json.loads(annotations[ALLOCATED])


def test_one_after_the_other_they_get_the_cards_in_minor_order() -> None:
    """On cards of 8 GiB, as in the seed; no two of its shares fit on one card together."""
    ledger = Ledger()
    ledger.set_cards("n1", (*cards(5, 8), RDMA))
    for title, (requests, minors, amounts) in EXAMPLES.items():
        ((_, entries),) = decided(ledger, admitted(title.replace(" ", "-"), requests)).items()
        assert [entry["minor"] for entry in entries] == minors, title
        for entry in entries:
            assert entry["resources"] == {f"koordinator.sh/{key}": text for key, text in amounts.items()}, title


@pytest.mark.parametrize(("requests", "minors", "amounts"), EXAMPLES.values(), ids=EXAMPLES)
def test_alone_each_begins_at_minor_0(requests: dict[str, str], minors: list[int], amounts: dict[str, str]) -> None:
    ledger = Ledger()
    ledger.set_cards("n1", (*cards(4, 8), RDMA))
    ((type, entries),) = decided(ledger, admitted("p", requests)).items()
    assert (type, [e["minor"] for e in entries]) == ("rdma" if "rdma" in amounts else "gpu", list(range(len(minors))))


def test_an_rdma_device_is_given_once() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", (*cards(4, 8), RDMA))
    assert decided(ledger, admitted("a", {"koordinator.sh/rdma": "60"}))
    refused = decided(ledger, admitted("b", {"koordinator.sh/rdma": "50"}))
    assert isinstance(refused, Rejection)
    assert "rdma" in str(refused)
    assert decided(ledger, admitted("c", {"koordinator.sh/rdma": "40", "koordinator.sh/gpu": "100"})).keys() == {
        "gpu",
        "rdma",
    }
