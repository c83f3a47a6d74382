"""gpushare in its own words: what the contract suite cannot know."""

import json
from typing import Any

import pytest

from mgpu.dialects import gpushare
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.ledger import Share
from mgpu.model.pods import Node, Pod, Stage, read_pod
from mgpu.settings import Settings, load_settings
from tests.builders import GIB, cards, pod
from tests.scheduler.gpushare import allocated, asking, container

SETTINGS = load_settings()
MIB = load_settings("dialects: {gpushare: {memoryUnit: mib}}")
NOW = 1_632_984_663_000_000_000


def read(raw: dict[str, Any], settings: Settings = SETTINGS) -> tuple[Pod, GpuRequest]:
    read_one = read_pod(raw)
    request = gpushare.read_request(read_one, settings)
    assert request is not None
    return read_one, request


def written(raw: dict[str, Any], settings: Settings = SETTINGS, **on: int) -> dict[str, str]:
    """The record of a pod whose containers are on these cards."""
    read_one, request = read(raw, settings)
    placement = Placement(tuple((c.container, (on[c.container],)) for c in request.containers))
    return gpushare.write_placement(read_one, request, placement, cards(4), settings, NOW)


def shares(raw: dict[str, Any]) -> list[tuple[str, object, int]] | None:
    found = gpushare.read_placement(*read(raw))
    return None if found is None else [(s.container, s.card, s.memory // GIB) for s in found]


def noted(raw: dict[str, Any], **annotations: str) -> dict[str, Any]:
    keys = {"idx": gpushare.INDEX, "allocation": gpushare.ALLOCATION}
    raw["metadata"]["annotations"] |= {keys[key]: value for key, value in annotations.items()}
    return raw


@pytest.mark.parametrize(("settings", "one"), [(SETTINGS, 1 << 30), (MIB, 1 << 20)])
def test_memory_counts_in_the_unit_and_compute_is_not_asked_for(settings: Settings, one: int) -> None:
    _, request = read(asking("p", 3), settings)
    (wanted,) = request.containers
    assert (wanted.cards, wanted.core, wanted.memory, wanted.whole) == (1, 0, 3 * one, False)


@pytest.mark.parametrize(
    ("unit", "units", "told"),
    [("GiB", 7, "at least 8 (GiB) for a share of a card, not 7"), ("MiB", 7999, "at least 8000 (MiB) for a share")],
)
def test_amount_below_the_least_of_the_settings_is_refused_in_its_unit(unit: str, units: int, told: str) -> None:
    settings = load_settings(f"dialects: {{gpushare: {{memoryUnit: {unit}, minGPUMemory: 8000}}}}")
    with pytest.raises(BadObject) as error:
        read(asking("p", units), settings)
    assert told in str(error.value)
    read(asking("p", units + 1), settings)


def test_every_container_asks_for_itself() -> None:
    init = ({**container("s", 2), "restartPolicy": "Always"}, container("i", 5))
    _, request = read(pod("p", container("a", 1), {"name": "none"}, container("b", 4), init=init))
    assert [(c.container, c.memory // GIB, c.stage) for c in request.containers] == [
        ("s", 2, Stage.SIDECAR),
        ("i", 5, Stage.INIT),
        ("a", 1, Stage.APP),
        ("b", 4, Stage.APP),
    ]


def test_the_record_is_the_page_s_table() -> None:
    assert written(asking("p", 3), c=2) == {
        "ALIYUN_COM_GPU_MEM_IDX": "2",
        "ALIYUN_COM_GPU_MEM_DEV": "80",
        "ALIYUN_COM_GPU_MEM_POD": "3",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": str(NOW),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
        "ALIYUN_COM_GPU_MEM_UNIT": "GiB",
        "scheduler.framework.gpushare.allocation": '{"c":{"2":3}}',
    }


def test_the_record_in_mib() -> None:
    record = written(asking("p", 8138), MIB, c=0)
    assert (record[gpushare.OF_CARD], record[gpushare.UNIT]) == (str(80 * 1024), "MiB")


def test_the_one_index_is_that_of_what_runs_longest() -> None:
    raw = pod("p", {"name": "none"}, container("c", 2), init=(container("i", 8),))
    record = written(raw, i=3, c=1)
    assert (record[gpushare.INDEX], record[gpushare.OF_POD]) == ("1", "8")
    assert json.loads(record[gpushare.ALLOCATION]) == {"i": {"3": 8}, "c": {"1": 2}}


def test_a_pod_of_the_peers_own_scheduler_is_on_its_one_card() -> None:
    raw = allocated("p", 3, "n1", 2)
    assert shares(raw) == [("c", 2, 3)]
    raw["spec"]["containers"].append(container("d", 4))
    raw["spec"]["initContainers"] = [container("i", 9)]
    for counted in ("7", "9"):  # as the peer counts, over app containers, and as mgpu does
        raw["metadata"]["annotations"][gpushare.OF_POD] = counted
        assert shares(raw) == [("i", 2, 9), ("c", 2, 3), ("d", 2, 4)]
    for forged in ("3", "8", "16"):
        raw["metadata"]["annotations"][gpushare.OF_POD] = forged
        with pytest.raises(BadObject, match=f"records {forged} units, but the pod requests 7 or 9"):
            shares(raw)


def test_a_record_by_position_is_read_and_names_win() -> None:
    raw = pod("p", container("a", 1), container("b", 7))
    assert shares(noted(raw, allocation='{"0":{"1":1},"1":{"2":7}}')) == [("a", 1, 1), ("b", 2, 7)]
    named = pod("p", container("1", 1), container("b", 7))
    assert shares(noted(named, allocation='{"1":{"0":1},"b":{"2":7}}')) == [("1", 0, 1), ("b", 2, 7)]


def test_init_containers_that_another_writer_leaves_out_are_on_the_pods_card() -> None:
    raw = pod("p", container("a", 1), init=(container("i", 2),))
    assert shares(noted(raw, idx="3", allocation='{"0":{"3":1}}')) == [("i", 3, 2), ("a", 3, 1)]


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"idx": "x"}, "must be a card index, not 'x'"),
        ({"idx": ""}, "must be a card index, not ''"),
        ({"idx": "-1"}, "must be a card index"),
        ({"idx": "٣"}, "must be a card index"),
        ({"allocation": "{"}, "is not JSON"),
        ({"allocation": "[" * 100_000}, "is not JSON"),
        ({"allocation": "[]"}, "must be a JSON object"),
        ({"allocation": "{}"}, "names no card for container 'c'"),
        ({"allocation": '{"other":{"0":3}}'}, "container 'other': does not request GPU memory"),
        ({"allocation": '{"c":{"0":3},"other":{"1":3}}'}, "container 'other': does not request GPU memory"),
        ({"allocation": '{"c":{}}'}, "container 'c': must name one card"),
        ({"allocation": '{"c":{"0":1,"1":2}}'}, "container 'c': must name one card"),
        ({"allocation": '{"c":3}'}, "container 'c': must name one card"),
        ({"allocation": '{"c":{"x":3}}'}, "container 'c': 'x' is not a card index"),
        ({"allocation": '{"c":{"0":"3"}}'}, "records '3' units, but the container requests 3"),
        ({"allocation": '{"c":{"0":0}}'}, "records '0' units, but the container requests 3"),
        ({"allocation": '{"c":{"0":true}}'}, "records 'True' units"),
        ({"idx": "1", "allocation": '{"c":{"0":3}}'}, "is 1, while"),
        ({"idx": "1", "allocation": "{}"}, None),
    ],
)
def test_what_a_record_may_not_say(annotations: dict[str, str], says: str | None) -> None:
    raw = noted(asking("p", 3), **annotations)
    if says is None:
        assert shares(raw) == [("c", 1, 3)]
        return
    with pytest.raises(BadObject) as error:
        shares(raw)
    assert says in str(error.value)


def test_a_record_keeps_its_unit_once_the_pod_is_bound() -> None:
    raw = asking("p", 3, node="n1", annotations=written(asking("p", 3), c=0))
    read_one, request = read(raw, MIB)
    assert gpushare.read_placement(read_one, request) == (Share("c", 0, memory=3 * GIB),)
    del raw["spec"]["nodeName"]
    assert read(raw, MIB)[1].containers[0].memory == 3 << 20


def test_acknowledgement_marks_a_record_once() -> None:
    raw = asking("p", 3, annotations=written(asking("p", 3), c=0))
    assert gpushare.acknowledgement(read_pod(raw)) == {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}
    raw["metadata"]["annotations"] |= gpushare.acknowledgement(read_pod(raw))
    assert gpushare.acknowledgement(read_pod(raw)) == gpushare.acknowledgement(read_pod(asking("q"))) == {}


@pytest.mark.parametrize(("settings", "unit"), [(SETTINGS, 1), (MIB, 1024)])
def test_what_a_container_sees(settings: Settings, unit: int) -> None:
    read_one, request = read(pod("p", container("a", 2 * unit), container("b", 4 * unit)), settings)
    seen = gpushare.environment(read_one, request.containers[1], (cards(4)[3],), cards(4))
    assert seen == {
        "ALIYUN_COM_GPU_MEM_IDX": "3",
        "ALIYUN_COM_GPU_MEM_POD": str(6 * unit),
        "ALIYUN_COM_GPU_MEM_CONTAINER": str(4 * unit),
        "ALIYUN_COM_GPU_MEM_DEV": str(80 * unit),
    }


def test_what_a_node_offers() -> None:
    """GiB per card is floor(MiB / 1024): the seed's P40 has 22,919 MiB and offers 22."""
    made = (Card(0, "GPU-0", "P40", 22919 << 20), Card(1, "GPU-1", "", 12196 << 20), Card(0, "x", "", 0, type="rdma"))
    assert [(r.name, r.amounts, r.as_ids) for r in gpushare.resources(made, SETTINGS)] == [
        ("aliyun.com/gpu-mem", ((0, 22), (1, 11)), True),
        ("aliyun.com/gpu-count", ((0, 1), (1, 1)), False),
    ]
    memory, count = gpushare.resources(made, MIB)
    assert (memory.amounts, memory.as_ids, count.as_ids) == (((0, 22919), (1, 12196)), False, False)


def test_bytes_held_are_counted_in_whole_units() -> None:
    card = Card(0, "GPU-0", "P40", 22919 << 20)
    counted = [gpushare.held_units(held, card, GIB) for held in (0, 1, GIB, GIB + 1, card.memory, card.memory + 1)]
    assert counted == [0, 1, 1, 2, 22, 23]


@pytest.mark.parametrize(
    ("capacity", "gib"),
    [
        ({"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"}, [16, 16]),
        ({"aliyun.com/gpu-mem": "33", "aliyun.com/gpu-count": "2"}, [16, 16]),
        ({"aliyun.com/gpu-mem": "1", "aliyun.com/gpu-count": "2"}, []),
        ({"aliyun.com/gpu-mem": "x", "aliyun.com/gpu-count": "2"}, []),
        ({"aliyun.com/gpu-mem": "9E", "aliyun.com/gpu-count": "8E"}, []),
        ({"aliyun.com/gpu-mem": "9E", "aliyun.com/gpu-count": "2"}, []),
        ({"aliyun.com/gpu-mem": "-32", "aliyun.com/gpu-count": "2"}, []),
        ({"aliyun.com/gpu-count": "2"}, []),
        ({}, []),
    ],
)
def test_cards_of_a_node_without_device_are_equal(capacity: dict[str, str], gib: list[int]) -> None:
    assert [card.memory >> 30 for card in gpushare.cards_from_capacity(Node("n1", capacity=capacity), SETTINGS)] == gib
