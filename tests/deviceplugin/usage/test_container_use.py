"""The use of processes is added up for the containers that hold shares; everything else is foreign or not known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from deviceplugin.isolation.backend import Measured
from deviceplugin.pods.capacity_check import holding
from deviceplugin.pods.gpu_pod import MIRROR, GpuPod, LimitedPod
from deviceplugin.usage.cgroup_names import CgroupName
from deviceplugin.usage.claim_use import ClaimUse, claim_uses
from deviceplugin.usage.container_use import ContainerUse, NodeShares, Usage, combine
from deviceplugin.usage.nvml_usage import CardReading, ProcessUse
from deviceplugin.usage.process_owners import Owner, Owners, Unowned
from mgpu.dialects import mtgpu
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.slice_names import PLACES
from mgpu.model.usage_problems import UsageProblem
from tests.builders import GIB, cards
from tests.deviceplugin.records import decided, read, started
from tests.deviceplugin.usage.proc import container_id

GPUS = cards(2)
ZERO, ONE = GPUS[0].uuid, GPUS[1].uuid


def runs(name: str, on: str = "0", annotations: Mapping[str, str] | None = None) -> GpuPod:
    """A pod of which the container `c` runs, with 1 GiB of each of these cards."""
    raw = started(decided(name, "0"))
    raw["metadata"]["annotations"] |= annotations or {}
    found = read(raw)
    given = tuple(Share("c", int(index), memory=GIB) for index in on.split(","))
    return replace(found, shares=given)


def shares(*pods: GpuPod, limited: Sequence[LimitedPod] = ()) -> NodeShares:
    return NodeShares(GPUS, GPUS, [holding(one, GPUS) for one in pods], pods, limited)


def reading(*processes: tuple[int, int | None, float | None], card: str = ZERO) -> CardReading:
    return CardReading(card, 10 * GIB, 0.5, tuple(ProcessUse(*one) for one in processes))


def owned(**pods: Sequence[int]) -> tuple[dict[int, Owner], dict[str, tuple[str, str]]]:
    """Owners of processes, and names of containers: each pod's container `c` has these processes."""
    owners: dict[int, Owner] = {}
    names = {}
    for n, (pod, pids) in enumerate(sorted(pods.items())):
        names[container_id(n)] = (f"uid-{pod}", "c")
        owners |= {pid: CgroupName(f"uid-{pod}", container_id(n)) for pid in pids}
    return owners, names


def combined(
    held: NodeShares,
    readings: Sequence[CardReading],
    of: tuple[Mapping[int, Owner], Mapping[str, tuple[str, str]]],
    *measured: Measured,
) -> Usage:
    return combine(held, readings, Owners(of[0]), of[1], measured)


def rows(usage: Usage) -> list[tuple[str, int, int | None, float | None]]:
    return [(one.pod, one.card.index, one.memory, one.sm) for one in usage.containers]


def test_processes_of_a_container_are_added_up_for_each_card() -> None:
    found = combined(
        shares(runs("p", "0,1"), runs("q")),
        [reading((1, GIB, 0.2), (2, 2 * GIB, 0.1), (3, GIB, 0.4)), reading((1, 4 * GIB, 0.9), card=ONE)],
        owned(p=[1, 2], q=[3]),
    )
    assert rows(found) == [
        ("p", 0, 3 * GIB, pytest.approx(0.3)),
        ("p", 1, 4 * GIB, 0.9),
        ("q", 0, GIB, 0.4),
    ]
    assert {one.limit for one in found.containers} == {GIB}
    assert [(c.memory, c.sm, c.foreign, c.foreign_memory) for c in found.cards] == [(10 * GIB, 0.5, 0, 0)] * 2
    assert found.problem is None


def test_container_without_processes_uses_nothing() -> None:
    found = combined(shares(runs("p")), [reading()], owned())
    assert rows(found) == [("p", 0, 0, 0.0)]


def test_processes_of_no_share_of_the_card_are_foreign() -> None:
    owners, names = owned(p=[1], other=[2])
    owners |= {3: Unowned.FOREIGN, 4: Unowned.GONE}
    processes = [(pid, GIB, 0.1) for pid in (1, 2, 3, 4)]
    found = combined(shares(runs("p", "1")), [reading(*processes), reading(card=ONE)], (owners, names))
    assert [(c.foreign, c.foreign_memory) for c in found.cards] == [(3, 3 * GIB), (0, 0)]
    assert rows(found) == [("p", 1, 0, 0.0)], "p uses card 0 without a share of it"


def test_part_that_nvml_does_not_know_makes_the_sum_unknown() -> None:
    found = combined(shares(runs("p")), [reading((1, GIB, None), (2, None, 0.1))], owned(p=[1, 2]))
    assert rows(found) == [("p", 0, None, None)]


@pytest.mark.parametrize(
    ("readings", "problem"),
    [
        pytest.param([reading((1, GIB, 0.1))], UsageProblem.NO_HOST_PIDS, id="processes of nobody"),
        pytest.param([CardReading(ZERO, 10 * GIB, 0.5, None, UsageProblem.NVML)], UsageProblem.NVML, id="no list"),
        pytest.param([], None, id="no reading"),
    ],
)
def test_without_knowledge_the_use_is_unknown_and_not_0(
    readings: list[CardReading], problem: UsageProblem | None
) -> None:
    owners = Owners({}, problem if problem is UsageProblem.NO_HOST_PIDS else None)
    found = combine(shares(runs("p")), readings, owners, {}, ())
    assert rows(found) == [("p", 0, None, None)]
    assert found.containers[0].limit == GIB
    assert (found.cards[0].foreign, found.cards[0].foreign_memory) == (None, None)
    assert found.cards[0].memory == (10 * GIB if readings else None)
    assert found.problem is problem


def test_what_a_back_end_measures_takes_precedence_and_needs_no_processes() -> None:
    key = ("uid-p", "c")
    measured = [Measured(key, ZERO, memory=5 * GIB), Measured(("uid-gone", "c"), ZERO, memory=GIB)]
    found = combined(shares(runs("p")), [reading((1, GIB, 0.2))], owned(p=[1]), *measured)
    assert rows(found) == [("p", 0, 5 * GIB, 0.2)]
    blind = combine(shares(runs("p")), [], Owners({}, UsageProblem.NO_HOST_PIDS), {}, measured)
    assert rows(blind) == [("p", 0, 5 * GIB, None)]
    sm = combined(shares(runs("p")), [reading((1, GIB, 0.2))], owned(p=[1]), Measured(key, ZERO, sm=0.7))
    assert rows(sm) == [("p", 0, GIB, 0.7)]


def test_process_of_an_unnamed_container_belongs_to_the_only_container_of_its_pod() -> None:
    owners, _ = owned(p=[1])
    assert rows(combined(shares(runs("p")), [reading((1, GIB, 0.1))], (owners, {}))) == [("p", 0, GIB, 0.1)]
    held = shares(runs("p"))
    both = replace(held.held[0], shares=tuple(Share(name, 0, memory=GIB) for name in ("c", "d")))
    pod = replace(held.pods[0], started_containers=frozenset({"c", "d"}))
    found = combined(replace(held, held=[both], pods=[pod]), [reading((1, GIB, 0.1))], (owners, {}))
    assert [one.memory for one in found.containers] == [0, 0]
    assert found.cards[0].foreign == 1


def test_name_from_the_runtime_counts_only_for_the_pod_of_the_cgroup() -> None:
    owners, names = owned(p=[1], q=[2])
    names = dict.fromkeys(names, ("uid-q", "another"))
    found = combined(shares(runs("p"), runs("q")), [reading((1, GIB, 0.1))], (owners, names))
    assert rows(found) == [("p", 0, GIB, 0.1), ("q", 0, 0, 0.0)]


def test_static_pod_is_known_by_the_kubelets_uid() -> None:
    static = "0123456789abcdef0123456789abcdef"
    owners, names = owned(p=[1])
    owners = {pid: owner._replace(pod=static) for pid, owner in owners.items() if isinstance(owner, tuple)}
    names = dict.fromkeys(names, (static, "c"))
    pod = runs("p", annotations={MIRROR: static})
    assert rows(combined(shares(pod), [reading((1, GIB, 0.1))], (owners, names))) == [("p", 0, GIB, 0.1)]


def test_containers_that_have_not_started_or_are_done_have_no_rows() -> None:
    started = runs("p")
    for pod in (
        replace(started, started_containers=frozenset()),
        replace(started, completed_init_containers=frozenset({"c"})),
    ):
        held = replace(shares(started), pods=[pod])
        assert combined(held, [reading()], owned()).containers == ()


def test_occupy_pod_is_not_measured() -> None:
    held = shares(runs("p"))
    name, labels = mtgpu.occupy_name("n1", "abc"), {mtgpu.OCCUPY_LABEL: "abc"}
    pod = replace(held.pods[0].pod, namespace=mtgpu.OCCUPY_NAMESPACE, name=name, labels=labels)
    occupying = replace(held.pods[0], pod=pod)
    assert combined(replace(held, pods=[occupying]), [reading()], owned()).containers == ()


def test_share_without_memory_has_no_limit() -> None:
    held = shares(runs("p"))
    only_core = replace(held.held[0], shares=(Share("c", 0, core=500),))
    assert combined(replace(held, held=[only_core]), [reading()], owned()).containers[0].limit is None


def test_whole_card_is_limited_by_its_memory() -> None:
    held = shares(runs("p"))
    whole = replace(held.held[0], shares=(Share("c", 0, whole=True),))
    (found,) = combined(replace(held, held=[whole]), [reading()], owned()).containers
    assert (found.whole, found.limit) == (True, GPUS[0].memory)


def test_slices_are_limits_on_their_card() -> None:
    slices = [Card(n + PLACES, f"MIG-{n}", "", 10 * GIB, type="mig-1g.10gb") for n in (0, 4)]
    pod = runs("p")
    held = Holding("uid-p", "ns", "p", "n1", "slices", tuple(Share("c", s.index, type=s.type) for s in slices))
    amounts = [replace(share, memory=10 * GIB) for share in held.shares]
    of_node = NodeShares(GPUS, [GPUS[0], *slices], [replace(held, shares=tuple(amounts))], [pod])
    found = combined(of_node, [reading(), reading((1, GIB, None), card=ONE)], owned(p=[1]))
    assert [(one.card.uuid, one.memory, one.limit, one.whole) for one in found.containers] == [
        (ONE, GIB, 20 * GIB, False)
    ]


def test_pods_of_mtgpupods_appear_with_their_processes() -> None:
    pod = LimitedPod("ns", "m", "uid-m", ZERO, 100, 500, 4 * GIB)
    found = combined(shares(limited=[pod]), [reading((1, GIB, 0.1)), reading((1, GIB, 0.1), card=ONE)], owned(m=[1]))
    assert [card.foreign for card in found.cards] == [0, 1]
    assert found.containers == (ContainerUse("uid-m", "ns", "m", "c", GPUS[0], GIB, 0.1, 4 * GIB),)


def test_pods_of_mtgpupods_appear_with_what_a_back_end_measures() -> None:
    pod = LimitedPod("ns", "m", "uid-m", ZERO, 100, 500, 4 * GIB)
    of_m = [Measured(("uid-m", "c"), uuid, memory=GIB) for uuid in (ZERO, ONE)]
    blind = combine(shares(limited=[pod]), [], Owners({}, UsageProblem.NO_HOST_PIDS), {}, of_m)
    assert blind.containers == (ContainerUse("uid-m", "ns", "m", "c", GPUS[0], GIB, None, 4 * GIB),)


def test_claims_have_the_use_of_the_containers_that_see_their_cards() -> None:
    seen = ContainerUse("uid-p", "ns", "p", "c", GPUS[0], limit=GIB, claims=("a",))
    found = combined(replace(shares(), by_claims=[seen]), [reading((1, GIB, 0.25), (2, GIB, 0.5))], owned(p=[1, 2]))
    assert claim_uses(found.containers) == (ClaimUse("ns", "a", GPUS[0], 2 * GIB, 0.75),)


def test_use_of_a_container_that_also_has_a_share_of_the_card_itself_is_not_that_of_its_claim() -> None:
    pod = runs("p")
    seen = ContainerUse("uid-p", pod.pod.namespace, "p", "c", GPUS[0], limit=GIB, claims=("a",))
    found = combined(replace(shares(pod), by_claims=[seen]), [reading((1, GIB, 0.2))], owned(p=[1]))
    assert claim_uses(found.containers) == (ClaimUse(pod.pod.namespace, "a", GPUS[0]),)
    assert (rows(found), found.containers[0].limit) == ([("p", 0, GIB, 0.2)], 2 * GIB)


def test_rows_are_in_a_total_order() -> None:
    pods = [runs(name, "1") for name in ("b", "a", "c")]
    found = combined(shares(*pods), [], owned())
    assert [one.pod for one in found.containers] == ["a", "b", "c"]
