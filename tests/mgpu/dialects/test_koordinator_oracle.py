"""Facts of Koordinator's own tests, beside the repository; skipped where they are not there.

Source: docs/design/koordinator.md, "Oracle".

Entries marked `seed_conflict` are held to the seed; rows with `dcu.com/gpu` are out of scope.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu import dialects
from mgpu.dialects import koordinator as koord
from mgpu.dialects.device_allocated import ALLOCATED
from mgpu.model.asks import Ask, ContainerAsk, Placement, Rejection
from mgpu.model.cards import Card, CardState
from mgpu.model.errors import BadObject
from mgpu.model.inventory import read_device
from mgpu.model.ledger import Holding, Ledger, Share
from mgpu.model.pods import Node, read_pod
from mgpu.model.quantities import whole_bytes
from mgpu.settings import Settings, load_settings
from scheduler.decide import assess, record
from tests.builders import pod
from tests.mgpu.dialects.contract import resources
from tests.mgpu.serving.reviews import patched
from webhook.mutate import mutate
from webhook.validate import validate_create

FILE = Path(__file__).parents[4] / "shared" / "oracles" / "koordinator_cases.json"
ORACLE: Any = json.loads(FILE.read_text()) if FILE.exists() else {"cases": [], "vectors": {}, "legend": {}}
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the oracle's file is not beside this checkout")

DEFAULT = load_settings("")
ANY_AMOUNT = load_settings("dialects: {koordinator: {minGPUMemory: 0}}")
NODE = Node("n1")
Raw = dict[str, Any]


def cases(kind: str) -> pytest.MarkDecorator:
    found = [case for case in ORACLE["cases"] if case["kind"] == kind]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


def rows(vector: str) -> pytest.MarkDecorator:
    found = [row for row in ORACLE["vectors"].get(vector, {"rows": []})["rows"] if "dcu.com/gpu" not in str(row)]
    ids = [json.dumps(row[0]) if isinstance(row[0], dict) else json.dumps(row[1]) for row in found]
    return pytest.mark.parametrize("row", found, ids=ids)


def test_every_kind_of_case_is_held() -> None:
    held = {"allocate", "split", "fill", "state", "annotation", "mutate"}
    assert {case["kind"] for case in ORACLE["cases"]} == held
    assert ORACLE["vectors"].keys() == {"convert_request", "fill_memory", "validate_request"}


def asking(requests: Mapping[str, str]) -> Raw:
    return pod("p", resources({ORACLE["legend"].get(name, name): amount for name, amount in requests.items()}))


def ask_of(requests: Mapping[str, str], settings: Settings = DEFAULT) -> Ask | None:
    return dialects.read_ask(read_pod(asking(requests)), settings)


def device_object(devices: Mapping[str, Mapping[str, Any]], ids: Mapping[str, Mapping[str, str]] | None = None) -> Raw:
    entries = [
        {
            "type": type,
            "id": ((ids or {}).get(type) or {}).get(minor, f"{type}-{minor}"),
            "minor": int(minor),
            "health": True,
            "resources": {ORACLE["legend"][name]: str(amount) for name, amount in device["total"].items()},
        }
        for type, of_type in devices.items()
        for minor, device in of_type.items()
    ]
    return {"spec": {"devices": entries}}


def states(devices: Mapping[str, Mapping[str, Any]]) -> list[CardState]:
    """The cards, filled as the case has them."""
    found = []
    for card in read_device(device_object(devices)):
        device = devices[card.type][str(card.minor)]
        used = {name: total - device["free"].get(name, 0) for name, total in device["total"].items()}
        core, memory = used.get("core", used.get(card.type, 0)) * 10, used.get("mem", 0)
        found.append(CardState(card, core, memory, int(any(used.values())), ratio_used=used.get("ratio", 0)))
    return found


def allocation(annotations: Mapping[str, str]) -> dict[str, list[Raw]]:
    """What the annotation says, in the oracle's words."""
    names = {name: short for short, name in ORACLE["legend"].items()}
    return {
        type: [
            {
                "minor": entry["minor"],
                "resources": {names[name]: whole_bytes(amount) for name, amount in entry["resources"].items()},
            }
            for entry in of_type
        ]
        for type, of_type in json.loads(annotations[ALLOCATED]).items()
    }


def allocate(case: Any, settings: Settings = DEFAULT) -> dict[str, list[Raw]] | Rejection:
    raw, cards = asking(case["input"]["requests"]), states(case["input"]["devices"])
    ask = dialects.read_ask(read_pod(raw), settings)
    assert ask is not None
    found = assess(ask, NODE, cards, settings)
    return found if isinstance(found, Rejection) else allocation(record(read_pod(raw), ask, found, cards, settings, 0))


@cases("allocate")
def test_allocation(case: Any) -> None:
    found = allocate(case)
    if "error" in case["expect"]:
        assert isinstance(found, Rejection)
        in_use = any(state.shares for state in states(case["input"]["devices"]))
        assert found.hopeless is not in_use  # of one card alone two cannot be freed either (kubernetes.md)
        return
    expected = case["expect"]["allocation"]
    if "seed_conflict" in case:
        spread = load_settings("dialects: {koordinator: {policy: spread}}")
        assert allocate(case, spread) == expected
        expected = {"gpu": [{**expected["gpu"][0], "minor": 1}]}
    assert found == expected


@cases("split")
def test_split(case: Any) -> None:
    ask, per_card = ask_of(case["input"]["requests"], ANY_AMOUNT), case["expect"]["per_card"]
    assert ask is not None
    (only,) = ask.containers
    assert (only.cards, not only.whole) == (case["expect"]["count"], case["expect"]["is_shared"])
    assert (only.core, only.memory, only.ratio) == (
        per_card["core"] * 10,
        per_card.get("mem", 0),
        per_card.get("ratio", 0),
    )


@cases("fill")
def test_fill(case: Any) -> None:
    taken = ContainerAsk("c", memory=case["input"]["mem"], ratio=0).takes(sized(case["input"]["card_total_mem"]))
    assert taken.ratio == case["expect"]["ratio"] + 1 == 13  # rounded up (koordinator.md)


def sized(memory: int) -> Card:
    return Card(0, "GPU-0", "", memory, minor=0)


@cases("state")
def test_state(case: Any) -> None:
    """The pod has one container that asks for what is recorded; there it holds, and gives back, exactly that."""
    given, ledger = case["input"]["pod"], Ledger()
    ledger.set_cards(NODE.name, read_device(device_object(case["input"]["devices"])))
    raw = asking({"core": "60", "ratio": "50"})
    meta = {**raw["metadata"], "namespace": given["namespace"], "name": given["name"]}
    found = read_pod({**raw, "metadata": {**meta, "annotations": given["annotations"]}})
    ask = dialects.read_ask(found, DEFAULT)
    assert ask is not None
    shares = koord.read_placement(found, ask)
    assert shares is not None
    ledger.hold(Holding(found.uid, found.namespace, found.name, NODE.name, ask.dialect, shares))
    assert fullness(ledger) == case["expect"]["after_add"]["gpu"]["1"]
    ledger.release(found.uid)
    assert fullness(ledger) == case["expect"]["after_delete"]["gpu"]["1"]


def fullness(ledger: Ledger) -> Raw:
    (card,) = ledger.cards(NODE.name)
    free = {"core": card.core_free // 10, "ratio": card.ratio_free, "mem": card.memory_free}
    used = {"core": card.core_used // 10, "ratio": card.ratio_used, "mem": card.memory_used}
    return {"free": free, "used": {name: amount for name, amount in used.items() if amount}}


@cases("annotation")
def test_annotation(case: Any) -> None:
    given = case["input"]["allocation"]
    devices = {t: {str(d["minor"]): {"total": d["resources"]} for d in of_type} for t, of_type in given.items()}
    cards = read_device(device_object(devices, case["input"]["device_ids"]))
    raw = read_pod(asking({"core": "200", "ratio": "200", "rdma": "100"}))
    ask = dialects.read_ask(raw, DEFAULT)
    assert ask is not None
    placement = Placement((("c", (0, 1)),), others=(("rdma", "c", (1,)),))
    assert koord.write_placement(raw, ask, placement, cards, DEFAULT, 0) == case["expect"]


@cases("mutate")
def test_mutation(case: Any) -> None:
    raw = asking(case["input"]["requests"])
    expected = {name: n for name, n in case["expect"]["requests"].items() if name != "shared"}  # not in the seed
    (found,) = patched(raw, mutate(raw, DEFAULT).patch)["spec"]["containers"]
    assert found["resources"] == {kind: amounts_of(expected) for kind in ("requests", "limits")}


def amounts_of(requests: Mapping[str, str]) -> Raw:
    return {ORACLE["legend"][name]: amount for name, amount in requests.items()}


@rows("convert_request")
def test_conversion_of_a_request(row: Any) -> None:
    """The ask still says by which name it came: on some nodes NVIDIA's own plugin serves that."""
    requests, converted = row
    ask, expected = ask_of(requests), ask_of(converted)
    assert ask is not None
    assert replace(ask, containers=tuple(replace(c, stock=False) for c in ask.containers)) == expected


@rows("fill_memory")
def test_conversion_on_a_card(row: Any) -> None:
    total, given, filled = row
    if isinstance(filled, str):
        with pytest.raises(BadObject):
            read_device(device_object({"gpu": {"0": {"total": {"mem": total}}}}))
        return
    share = Share("c", 0, memory=given.get("mem", 0), ratio=given.get("ratio", 0))
    taken = share.amount(sized(total))
    assert {"mem": taken.memory, "ratio": taken.ratio} == {**given, **filled}


@rows("validate_request")
def test_validation_of_a_request(row: Any) -> None:
    requests, ok = row
    raw = asking(requests)
    if not requests:
        assert ask_of(requests) is None
        return
    assert (validate_create(raw, DEFAULT) == []) is ok
