"""The resources that a node offers as ids or in its status, and the limits of their ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.inventory.offers import id_limits, id_resources, status_amounts
from deviceplugin.kubelet.device_ids import MAX_IDS
from mgpu.settings import load_settings
from tests.builders import card, cards

MGPU, GPU_MEM, CORE, RATIO = (
    "vke.volcengine.com/mgpu-core",
    "aliyun.com/gpu-mem",
    "koordinator.sh/gpu-core",
    "koordinator.sh/gpu-memory-ratio",
)
WHOLE, SHARE = "nvidia.com/gpu", "mgpu.io/share"
SETTINGS = load_settings()
MIB = load_settings("dialects: {gpushare: {memoryUnit: MiB}}")


def units(count: int, gib: int = 80) -> dict[str, int]:
    return {r.name: sum(amount for _, amount in r.amounts) for r in id_resources(cards(count, gib), SETTINGS)}


def test_countable_resources_are_offered_as_ids() -> None:
    assert units(1) == {SHARE: 16, MGPU: 100, GPU_MEM: 80, WHOLE: 1, CORE: 100, RATIO: 100}
    assert [r.name for r in id_resources((), MIB)] == [SHARE, MGPU, WHOLE, CORE, RATIO]


def test_resource_is_either_ids_or_in_node_status() -> None:
    for settings in (SETTINGS, MIB):
        ids = {r.name for r in id_resources((), settings)}
        assert not ids & status_amounts(cards(2), settings).keys()
    assert status_amounts(cards(2), MIB)[GPU_MEM] == 2 * 80 << 10
    assert GPU_MEM not in status_amounts(cards(2), SETTINGS)


def test_eight_cards_have_ids_for_all_units() -> None:
    assert id_limits(cards(8), SETTINGS, MAX_IDS) == units(8)


def test_ids_of_sixteen_cards_are_divided_evenly_among_the_vocabularies() -> None:
    """1,242 each for mGPU, gpushare and Koordinator remain after `mgpu.io/share` and whole cards."""
    found = id_limits(cards(16), SETTINGS, MAX_IDS)
    assert found == {SHARE: 256, WHOLE: 16, MGPU: 1243, GPU_MEM: 1242, CORE: 621, RATIO: 622}
    small = id_limits(cards(16, 32), SETTINGS, MAX_IDS)
    assert small[GPU_MEM] == 512, "ids that one vocabulary does not need go to the others"
    assert (small[MGPU], small[CORE] + small[RATIO]) == (1600, 1616)


@pytest.mark.parametrize("name", ["mgpu", "gpushare", "koordinator"])
def test_single_vocabulary_gets_ids_for_all_units(name: str) -> None:
    others = ", ".join(f"{other}: {{enabled: false}}" for other in ("mgpu", "gpushare", "koordinator") if other != name)
    settings, own = load_settings(f"dialects: {{{others}}}"), cards(16)
    units_there = {r.name: sum(amount for _, amount in r.amounts) for r in id_resources(own, settings)}
    assert id_limits(own, settings, MAX_IDS) == units_there


@given(st.lists(st.integers(1, 192), max_size=40), st.integers(0, MAX_IDS))
def test_all_ids_within_the_limit_are_used_where_needed(sizes: list[int], limit: int) -> None:
    own = tuple(card(i, gib) for i, gib in enumerate(sizes))
    needs = {r.name: sum(amount for _, amount in r.amounts) for r in id_resources(own, SETTINGS)}
    found = id_limits(own, SETTINGS, limit)
    assert found.keys() == needs.keys()
    assert all(found[name] <= needs[name] for name in needs)
    assert sum(found.values()) == min(limit, sum(needs.values()))
