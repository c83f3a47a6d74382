"""The Koordinator dialect against the results that Koordinator's own tests demand.

Source: docs/design/koordinator.md, "Oracle".
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from mgpu import dialects
from mgpu.dialects import koordinator as koord
from mgpu.dialects.koordinator_record import ALLOCATED
from mgpu.model.cards import Card, CardState
from mgpu.model.device_object import read_device
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Rejection
from mgpu.model.ledger import Holding, Ledger, Share
from mgpu.model.pods import Node, read_pod
from mgpu.model.quantities import whole_bytes
from mgpu.settings import Settings, load_settings
from scheduler.engine.node_assessment import assess, record
from tests import data
from tests.builders import pod
from tests.mgpu.dialects.contract import resources
from tests.mgpu.serving.reviews import patched
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create

FACTS = data.load("koordinator")
NAMES: Mapping[str, str] = FACTS["resources"]

DEFAULT = load_settings("")
SPREAD = load_settings("dialects: {koordinator: {policy: spread}}")
ANY_AMOUNT = load_settings("dialects: {koordinator: {minGPUMemory: 0}}")
NODE = Node("n1")
Raw = dict[str, Any]


def by_name(cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def by_content(cases: Iterable[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=json.dumps)


def named(amounts: Mapping[str, object]) -> dict[str, str]:
    """Amounts of resources by their short names → by their full ones."""
    return {NAMES.get(name, name): str(amount) for name, amount in amounts.items()}


def counted(amounts: Mapping[str, object]) -> dict[str, int]:
    return {name: whole_bytes(str(amount)) for name, amount in amounts.items()}


def requesting(requests: Mapping[str, object]) -> Raw:
    return pod("p", resources(named(requests)))


def request_of(requests: Mapping[str, object], settings: Settings = DEFAULT) -> GpuRequest:
    request = dialects.read_request(read_pod(requesting(requests)), settings)
    assert request is not None
    return request


def device_object(devices: Mapping[str, Mapping[int, Raw]]) -> Raw:
    """A Device with `devices`: type → minor → `mem` of a GPU, and `id` where it matters."""
    entries = [
        {
            "type": type,
            "id": device.get("id", f"{type}-{minor}"),
            "minor": minor,
            "health": True,
            "resources": named({"core": 100, "ratio": 100, "mem": device["mem"]} if "mem" in device else {type: 100}),
        }
        for type, of_type in devices.items()
        for minor, device in of_type.items()
    ]
    return {"spec": {"devices": entries}}


def card_states(devices: Mapping[str, Mapping[int, Raw]]) -> list[CardState]:
    """The node's cards, as much in use as the case says."""
    states = []
    for card in read_device(device_object(devices)):
        assert card.minor is not None
        used = 100 - devices[card.type][card.minor]["free"]
        ratio = used if card.type == "gpu" else 0
        states.append(CardState(card, used * 10, card.memory * used // 100, int(used > 0), ratio_used=ratio))
    return states


def allocation_in(annotations: Mapping[str, str]) -> dict[str, dict[int, dict[str, int]]]:
    """The recorded allocation as type → minor → amounts by short names."""
    short = {full: name for name, full in NAMES.items()}
    return {
        type: {
            entry["minor"]: counted({short[name]: amount for name, amount in entry["resources"].items()})
            for entry in of_type
        }
        for type, of_type in json.loads(annotations[ALLOCATED]).items()
    }


@by_name(FACTS["allocations"])
def test_allocation(case: Raw) -> None:
    settings = SPREAD if case.get("policy") == "spread" else DEFAULT
    raw, request, cards = requesting(case["requests"]), request_of(case["requests"]), card_states(case["devices"])
    found = assess(request, NODE, cards, settings)
    if "rejected" in case:
        assert isinstance(found, Rejection)
        assert found.hopeless is not case["rejected"]["more_free_helps"]
        return
    assert not isinstance(found, Rejection)
    expected = {
        type: {minor: counted(amounts) for minor, amounts in of_type.items()}
        for type, of_type in case["allocation"].items()
    }
    assert allocation_in(record(read_pod(raw), request, found, cards, settings, 0)) == expected


@by_name(FACTS["splits"])
def test_split_over_cards(case: Raw) -> None:
    (only,) = request_of(case["requests"], ANY_AMOUNT).containers
    per_card = case["per_card"]
    assert (only.cards, only.whole) == (case["cards"], case["whole"])
    assert only.core == per_card["core"] * 10
    assert (only.memory, only.ratio) == (per_card.get("mem", 0), per_card.get("ratio", 0))


def card_of(memory: str | int) -> Card:
    return Card(0, "GPU-0", "", whole_bytes(str(memory)), minor=0)


def test_memory_ratio_is_rounded_up() -> None:
    case = FACTS["memory_ratio"]
    taken = ContainerRequest("c", memory=whole_bytes(case["mem"]), ratio=0).amount_on(card_of(case["card"]))
    assert taken.ratio == case["ratio"]


def test_accounting_of_a_recorded_allocation() -> None:
    """The pod's container requests what is recorded; it holds exactly that, and gives exactly that back."""
    case, ledger = FACTS["accounting"], Ledger()
    card = case["card"]
    ledger.set_cards(NODE.name, read_device(device_object({"gpu": {card["minor"]: card}})))
    entry = {"minor": card["minor"], "resources": named(case["allocated"])}
    raw = requesting({"core": case["allocated"]["core"], "ratio": case["allocated"]["ratio"]})
    raw["metadata"]["annotations"] = {ALLOCATED: json.dumps({"gpu": [entry]})}
    found = read_pod(raw)
    request = dialects.read_request(found, DEFAULT)
    assert request is not None
    shares = koord.read_placement(found, request)
    assert shares is not None
    ledger.hold(Holding(found.uid, found.namespace, found.name, NODE.name, request.dialect, shares))
    assert free_and_used(ledger) == (counted(case["free"]), counted(case["allocated"]))
    ledger.release(found.uid)
    whole = {"core": 100, "ratio": 100, "mem": whole_bytes(card["mem"])}
    assert free_and_used(ledger) == (whole, {"core": 0, "ratio": 0, "mem": 0})


def free_and_used(ledger: Ledger) -> tuple[dict[str, int], dict[str, int]]:
    (card,) = ledger.cards(NODE.name)
    free = {"core": card.core_free // 10, "ratio": card.ratio_free, "mem": card.memory_free}
    used = {"core": card.core_used // 10, "ratio": card.ratio_used, "mem": card.memory_used}
    return free, used


def test_annotation_of_an_allocation() -> None:
    case = FACTS["record"]
    raw, request = read_pod(requesting(case["requests"])), request_of(case["requests"])
    placement = Placement((("c", (0, 1)),), others=(("rdma", "c", (1,)),))
    cards = read_device(device_object(case["devices"]))
    written = koord.write_placement(raw, request, placement, cards, DEFAULT, 0)
    assert written == {case["annotation"]: json.dumps(case["content"], separators=(",", ":"))}


@by_content(FACTS["mutations"])
def test_mutation(case: Raw) -> None:
    raw = requesting(case["requests"])
    (found,) = patched(raw, mutate(raw, DEFAULT).patch)["spec"]["containers"]
    assert found["resources"] == {kind: named(case["becomes"]) for kind in ("requests", "limits")}


@by_content(FACTS["equal_requests"])
def test_requests_that_mean_the_same_are_read_alike(case: list[Raw]) -> None:
    """`is_nvidia_gpu` differs: NVIDIA's device plugin serves requests for `nvidia.com/gpu` on some nodes."""
    one, other = map(request_of, case)
    assert replace(one, containers=tuple(replace(c, is_nvidia_gpu=False) for c in one.containers)) == other


@by_content(FACTS["completed"])
def test_share_of_a_card_is_completed(case: Raw) -> None:
    if "error" in case:
        with pytest.raises(BadObject):
            read_device(device_object({"gpu": {0: {"mem": case["card"]}}}))
        return
    given, completed = counted(case["given"]), counted(case["completed"])
    taken = Share("c", 0, memory=given.get("mem", 0), ratio=given.get("ratio", 0)).amount(card_of(case["card"]))
    assert {"mem": taken.memory, "ratio": taken.ratio} == completed


@by_content(FACTS["validity"]["allowed"])
def test_valid_request_is_allowed(case: Raw) -> None:
    assert validate_create(requesting(case), DEFAULT) == []


@by_content(FACTS["validity"]["denied"])
def test_invalid_request_is_denied(case: Raw) -> None:
    assert validate_create(requesting(case), DEFAULT) != []
