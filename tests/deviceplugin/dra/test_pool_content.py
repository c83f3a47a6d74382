"""Pools of several slices: when the generation changes, and what the API server has meanwhile."""

from dataclasses import replace

from deviceplugin.dra.pool_content import PoolOffer, desired_pool
from deviceplugin.dra.slice_content import Raw, difference
from mgpu.model.mig import Instance
from mgpu.model.mig_resource_slices import PublishedMigCard
from mgpu.model.resource_slices import PublishedCard
from tests.builders import card

SHARED = PublishedCard(replace(card(9), model="L40S"), 1000, 80 << 30)


def offer(count: int = 1, *, core: int = 1000, taken: frozenset[Instance] = frozenset()) -> PoolOffer:
    return PoolOffer((replace(SHARED, core_free=core),), tuple(PublishedMigCard(card(i), taken) for i in range(count)))


def written(pool: list[Raw]) -> dict[str, Raw]:
    return {one["metadata"]["name"]: one for one in pool}


def generations(pool: list[Raw]) -> set[tuple[int, int]]:
    return {(one["spec"]["pool"]["generation"], one["spec"]["pool"]["resourceSliceCount"]) for one in pool}


def desired(wanted: PoolOffer, present: dict[str, Raw]) -> list[Raw]:
    return desired_pool("n1", "uid-n1", wanted, present)


def test_slices_of_a_pool_have_one_generation_and_count_each_other() -> None:
    pool = desired(offer(3), {})
    assert generations(pool) == {(1, len(pool))}
    assert [one["metadata"]["name"] for one in pool] == [
        "n1-gpu.mgpu.io-counters-00",
        "n1-gpu.mgpu.io-mig-00",
        "n1-gpu.mgpu.io-mig-01",
        "n1-gpu.mgpu.io",
    ]


def test_free_amounts_and_taints_do_not_change_the_generation() -> None:
    first = desired(offer(), {})
    later = desired(offer(core=300, taken=frozenset({Instance(4, "2g.20gb")})), written(first))
    assert generations(later) == generations(first)
    changed = [one["metadata"]["name"] for one in later if difference(written(first)[one["metadata"]["name"]], one)]
    assert changed == ["n1-gpu.mgpu.io-mig-00", "n1-gpu.mgpu.io"]


def test_further_card_gives_all_slices_a_new_generation() -> None:
    first = desired(offer(1), {})
    later = desired(offer(2), written(first))
    assert generations(later) == {(2, 3)}


def test_interrupted_writes_are_followed_by_another_generation() -> None:
    first = written(desired(offer(1), {}))
    second = desired(offer(3), first)
    half = {**first, **written(second[:2])}
    third = desired(offer(3), half)
    assert generations(third) == {(3, len(third))}
    assert desired(offer(3), written(third)) == third


def test_label_that_is_added_and_removed_leads_back_to_one_slice() -> None:
    alone = PoolOffer((SHARED,))
    first = desired(alone, {})
    assert generations(first) == {(1, 1)}
    labelled = desired(offer(), written(first))
    assert generations(labelled) == {(2, 3)}
    (last,) = desired(alone, written(labelled))
    assert generations([last]) == {(2, 1)}
