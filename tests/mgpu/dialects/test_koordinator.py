"""koordinator.md, rule by rule."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from mgpu.dialects import koordinator as koord
from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, whole_cards
from mgpu.model.ledger import Minor, Share, shares_of
from mgpu.model.pods import Stage, read_node, read_pod
from mgpu.settings import load_settings
from tests.builders import GIB, card, cards, node, pod
from tests.mgpu.dialects.contract import resources

DEFAULT = load_settings("")
RDMA, FPGA, NPU = (koord.PREFIX + type for type in ("rdma", "fpga", "npu"))
ALLOCATED, PER_CONTAINER = "scheduling.koordinator.sh/device-allocated", "mgpu.io/container-devices"
ALLOCATED_PATH, PER_CONTAINER_PATH = f"metadata.annotations[{ALLOCATED}]", f"metadata.annotations[{PER_CONTAINER}]"
Raw = dict[str, Any]


def asking(name: str = "c", /, **amounts: object) -> Raw:
    """A container: `asking(core=50, ratio=50, rdma=100)`."""
    names = {"core": koord.CORE, "memory": koord.MEMORY, "ratio": koord.RATIO, "shared": koord.SHARED}
    names |= {"gpu": koord.GPU, "nvidia": koord.NVIDIA}
    return {**resources({names.get(key, koord.PREFIX + key): str(n) for key, n in amounts.items()}), "name": name}


def read(*containers: Raw, **more: Any) -> GpuRequest:
    request = koord.read_request(read_pod(pod("p", *containers, **more)), DEFAULT)
    assert request is not None
    return request


def refused(**amounts: Any) -> str:
    with pytest.raises(BadObject) as error:
        read(asking(**amounts))
    return str(error.value)


def device(minor: int, type: str = "rdma") -> Card:
    return Card(minor, f"{type}-{minor}", "", 0, minor=minor, type=type)


def recorded(annotations: Mapping[str, object], *containers: Raw, **more: Any) -> tuple[Share, ...] | None:
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in annotations.items()}
    raw = pod("p", *containers, annotations=texts, **more)
    return koord.read_placement(read_pod(raw), read(*containers, **more))


class TestAsk:
    def test_the_shorthand_is_core_and_ratio(self) -> None:
        assert read(asking(gpu=50)).containers == (ContainerRequest("c", 1, 500, ratio=50),)

    def test_nvidia_gpu_is_whole_cards(self) -> None:
        assert read(asking(nvidia=2)).containers == (whole_cards("c", 2, is_nvidia_gpu=True),)
        assert read(asking(gpu=200)).containers == (whole_cards("c", 2),)

    def test_core_in_hundreds_beside_memory_is_as_many_cards(self) -> None:
        assert read(asking(core=200, memory="32Gi")).containers == (ContainerRequest("c", 2, 1000, 16 * GIB, ratio=0),)

    def test_the_larger_of_core_and_ratio_says_how_many_cards(self) -> None:
        assert read(asking(core=50, ratio=200)).containers == (ContainerRequest("c", 2, 250, ratio=100),)

    def test_a_share_is_divided_by_the_cards_that_it_spans(self) -> None:
        assert read(asking(shared=2, core=100, ratio=40)).containers == (ContainerRequest("c", 2, 500, ratio=20),)
        odd = ContainerRequest("c", 2, memory=(1 << 20) + 1, ratio=0)
        assert read(asking(shared=2, memory=(2 << 20) + 1)).containers == (odd,)

    def test_all_memory_without_core_leaves_the_core_to_others(self) -> None:
        assert read(asking(ratio=100)).containers == (ContainerRequest("c", 1, ratio=100),)

    def test_other_devices_stand_beside_and_alone(self) -> None:
        rdma = ContainerRequest("c", 1, 500, type="rdma")
        fpga = ContainerRequest("c", 3, 1000, type="fpga")
        request = read(asking(gpu=50, rdma=50, fpga=300))
        assert (request.containers, request.others) == ((ContainerRequest("c", 1, 500, ratio=50),), (fpga, rdma))
        assert read(asking(rdma=50)) == GpuRequest("koordinator", (), others=(rdma,))

    def test_any_other_name_is_a_type_of_devices(self) -> None:
        assert read(asking(npu=100)).others == (ContainerRequest("c", 1, 1000, type="npu"),)

    def test_each_container_asks_in_its_own_form(self) -> None:
        request = read(asking("a", nvidia=1), asking("b", gpu=30), init=({**asking("i", ratio=10)},))
        assert request.containers == (
            ContainerRequest("i", 1, ratio=10, stage=Stage.INIT),
            whole_cards("a", 1, is_nvidia_gpu=True),
            ContainerRequest("b", 1, 300, ratio=30),
        )

    def test_refusals_name_the_resources(self) -> None:
        alone = "cannot be requested alone; a container can request one of {nvidia.com/gpu}, {gpu}, "
        assert refused(core=50).startswith(f"spec.containers[0].resources.requests[{koord.CORE}]: {alone}")
        assert f"cannot be combined with {koord.MEMORY} and {koord.RATIO}" in refused(core=5, memory=6, ratio=7)
        assert "did you mean koordinator.sh/gpu-memory-ratio?" in refused(**{"gpu-mem-ratio": 5})
        assert "above 100 must be a multiple of 100 (whole devices), not 201" in refused(fpga=201)


LEAST = "dialects: {koordinator: {minGPUMemory: 1024, minGPUMemoryRatio: 5}}"


class TestLeastAmount:
    """A share of any size keeps whole-card pods off its cards."""

    @pytest.mark.parametrize(
        ("amounts", "told"),
        [
            ({"memory": 8}, "at least 1Mi per card, not 8 bytes over 1 card; "),
            ({"memory": (1 << 20) - 1}, "at least 1Mi per card, not 1048575 bytes over 1 card; "),
            ({"shared": 4, "memory": 4}, "at least 1Mi per card, not 4 bytes over 4 cards; "),
            ({"core": 200, "memory": "2047Ki"}, "at least 1Mi per card, not 2096128 bytes over 2 cards; "),
        ],
    )
    def test_memory_in_bytes_below_it_is_refused_with_the_rule(self, amounts: dict[str, Any], told: str) -> None:
        field = f"spec.containers[0].resources.requests[{koord.MEMORY}]"
        hint = "a number without a suffix is in bytes, and 8 GiB are written as 8Gi"
        assert refused(**amounts) == f"{field}: must be {told}{hint}"

    @pytest.mark.parametrize("amounts", [{"memory": "1Mi"}, {"shared": 4, "memory": "4Mi"}, {"ratio": 1}, {"gpu": 1}])
    def test_amounts_from_it_on_are_read(self, amounts: dict[str, Any]) -> None:
        assert read(asking(**amounts)).containers

    @pytest.mark.parametrize(
        ("amounts", "name"),
        [
            ({"memory": "1023Mi"}, koord.MEMORY),
            ({"gpu": 4}, koord.GPU),
            ({"ratio": 4}, koord.RATIO),
            ({"shared": 4, "core": 40, "ratio": 16}, koord.RATIO),
        ],
    )
    def test_it_can_be_set(self, amounts: dict[str, Any], name: str) -> None:
        raw = read_pod(pod("p", asking(**amounts)))
        assert koord.read_request(raw, DEFAULT)
        with pytest.raises(BadObject) as error:
            koord.read_request(raw, load_settings(LEAST))
        assert [problem.field for problem in error.value.problems] == [f"spec.containers[0].resources.requests[{name}]"]

    def test_percent_below_it_is_refused_with_the_rule(self) -> None:
        raw = read_pod(pod("p", asking(shared=4, ratio=16)))
        with pytest.raises(BadObject, match="must be at least 5 percent per card, not 16 over 4 cards"):
            koord.read_request(raw, load_settings(LEAST))

    def test_whole_cards_and_other_devices_have_none(self) -> None:
        for amounts in ({"nvidia": 1}, {"gpu": 200}, {"rdma": 1}):
            assert koord.read_request(read_pod(pod("p", asking(**amounts))), load_settings(LEAST))


class TestRecord:
    def write(self, placement: Placement, *containers: Raw, devices: tuple[Card, ...] = (), **more: Any) -> Any:
        raw = pod("p", *containers, **more)
        found = (*cards(3, 16), *devices)
        written = koord.write_placement(read_pod(raw), read(*containers, **more), placement, found, DEFAULT, 0)
        return {key: json.loads(text) for key, text in written.items()}

    def test_amounts_are_those_of_each_card(self) -> None:
        record = self.write(Placement((("c", (0, 2)),)), asking(shared=2, ratio=58))
        of_card = {"koordinator.sh/gpu-memory": str(16 * GIB * 29 // 100), "koordinator.sh/gpu-memory-ratio": "29"}
        assert record == {
            ALLOCATED: {
                "gpu": [
                    {"minor": 0, "resources": of_card, "id": "GPU-n1-0"},
                    {"minor": 2, "resources": of_card, "id": "GPU-n1-2"},
                ]
            }
        }

    def test_bytes_are_rounded_up_to_percent(self) -> None:
        ((_, entry),) = self.write(Placement((("c", (1,)),)), asking(memory=16 * GIB // 100 + 2)).items()
        assert entry["gpu"][0]["resources"]["koordinator.sh/gpu-memory-ratio"] == "2"

    def test_a_whole_card_is_all_of_it(self) -> None:
        record = self.write(Placement((("c", (1,)),)), asking(nvidia=1))
        full = {"gpu-core": "100", "gpu-memory": "16Gi", "gpu-memory-ratio": "100"}
        assert record[ALLOCATED]["gpu"] == [
            {"minor": 1, "resources": {f"koordinator.sh/{k}": v for k, v in full.items()}, "id": "GPU-n1-1"}
        ]

    def test_the_minor_is_not_the_index(self) -> None:
        swapped = (Card(0, "GPU-a", "", GIB, minor=1), Card(1, "GPU-b", "", GIB, minor=0))
        containers = asking("a", nvidia=1), asking("b", nvidia=1)
        raw = pod("p", *containers)
        placement = Placement((("a", (0,)), ("b", (1,))))
        written = koord.write_placement(read_pod(raw), read(*containers), placement, swapped, DEFAULT, 0)
        assert [(d["minor"], d["id"]) for d in json.loads(written[ALLOCATED])["gpu"]] == [(0, "GPU-b"), (1, "GPU-a")]
        assert json.loads(written[PER_CONTAINER]) == {"a": {"gpu": [1]}, "b": {"gpu": [0]}}

    def test_several_containers_are_one_allocation_and_a_record_of_our_own(self) -> None:
        """As the kubelet runs them: the init container's card is given again, the others' add up."""
        placement = Placement(
            (("i", (0,)), ("a", (0,)), ("b", (0,))), others=(("rdma", "a", (0, 1)), ("rdma", "b", (2,)))
        )
        containers = asking("a", gpu=30, rdma=200), asking("b", gpu=40, rdma=50)
        devices = tuple(map(device, range(3)))
        record = self.write(placement, *containers, init=(asking("i", gpu=60),), devices=devices)
        (gpu,) = record[ALLOCATED]["gpu"]
        assert (gpu["resources"]["koordinator.sh/gpu-core"], gpu["resources"]["koordinator.sh/gpu-memory-ratio"]) == (
            "70",
            "70",
        )
        assert [d["resources"] for d in record[ALLOCATED]["rdma"]] == [{RDMA: n} for n in ("100", "100", "50")]
        assert record[PER_CONTAINER] == {
            "i": {"gpu": [0]},
            "a": {"gpu": [0], "rdma": [0, 1]},
            "b": {"gpu": [0], "rdma": [2]},
        }
        shares = recorded(record, *containers, init=(asking("i", gpu=60),))
        request = read(*containers, init=(asking("i", gpu=60),))
        assert [(s.container, s.card) for s in shares or ()] == [
            *((name, "GPU-n1-0") for name in "iab"),
            *(("a", f"rdma-{i}") for i in range(2)),
            ("b", "rdma-2"),
        ]
        assert [s.core for s in shares or ()] == [s.core for s in shares_of(request, placement)]


def entry(minor: int, core: int = 0, memory: str = "", ratio: int = 0, prefix: str = "koordinator.sh/") -> Raw:
    """As Koordinator writes it: without id."""
    amounts = {"gpu-core": str(core), "gpu-memory": memory, "gpu-memory-ratio": str(ratio)}
    return {"minor": minor, "resources": {prefix + key: text for key, text in amounts.items() if text not in ("", "0")}}


class TestForeignRecord:
    """What Koordinator itself wrote: `device-allocated` alone."""

    def test_of_one_container_is_its(self) -> None:
        shares = recorded({ALLOCATED: {"gpu": [entry(1, 60, "8Gi", 50)]}}, asking(core=60, ratio=50))
        assert shares == (Share("c", Minor(1), 600, ratio=50),)
        assert shares[0].amount(card(1, 16)) == (600, 8 * GIB, 1, 50)

    @pytest.mark.parametrize(
        ("rows", "asked", "says"),
        [
            ([entry(0, 60, "8Gi", 28)], {"core": 60, "ratio": 29}, "minor 0 of gpu has 28 memory ratio"),
            ([entry(0, 61, "8Gi", 29)], {"core": 60, "ratio": 29}, "minor 0 of gpu has 61 core"),
            ([entry(0), entry(1)], {"core": 60, "ratio": 29}, "names 2 devices of type gpu, but the pod requests 1"),
            ([entry(0)], {"gpu": 1}, "minor 0 of gpu has 0 core, but its containers request 1"),
            ([entry(0)], {"ratio": 1}, "minor 0 of gpu has 0 memory ratio, but its containers request 1"),
            ([entry(0)], {"memory": "1Gi"}, "minor 0 of gpu has 0 memory, but its containers request 1073741824"),
            ([entry(0, 0, "2Gi", 5)], {"memory": "1Gi"}, "minor 0 of gpu has 2147483648 memory"),
            ([entry(0, 99, "", 100)], {"nvidia": 1}, "minor 0 of gpu has 99 core"),
            ([entry(0, 100, "", 100)], {"nvidia": 2}, "names 1 devices of type gpu, but the pod requests 2"),
        ],
    )
    def test_amounts_that_are_not_those_of_the_request_are_refused(
        self, rows: list[Raw], asked: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(BadObject, match=re.escape(says)):
            recorded({ALLOCATED: {"gpu": rows}}, asking(**asked))
        by_container = {"c": {"gpu": [row["minor"] for row in rows]}}
        with pytest.raises(BadObject):
            recorded({ALLOCATED: {"gpu": rows}, PER_CONTAINER: by_container}, asking(**asked))

    def test_memory_that_does_not_divide_evenly_may_be_rounded_either_way(self) -> None:
        for of_each in (500_000_000, 500_000_001):
            rows = [entry(i, 0, str(of_each), 3) for i in (0, 1)]
            shares = recorded({ALLOCATED: {"gpu": rows}}, asking(shared=2, memory=1_000_000_001))
            assert [s.memory for s in shares or ()] == [500_000_001, 500_000_001]

    def test_of_several_containers_is_all_of_theirs_and_counted_once(self) -> None:
        containers = asking("a", gpu=30), asking("b", gpu=40)
        shares = recorded({ALLOCATED: {"gpu": [entry(1, 70, "1", 70)]}}, *containers)
        assert shares == (Share("a", Minor(1), 700, ratio=70), Share("b", Minor(1), ratio=0))
        for forged in (
            [entry(1, 69, "", 70)],
            [entry(1, 70, "", 71)],
            [entry(1)],
            [entry(i, 70, "", 70) for i in (0, 1)],
        ):
            with pytest.raises(BadObject):
                recorded({ALLOCATED: {"gpu": forged}}, *containers)

    def test_the_seeds_older_names_and_numbers_are_read(self) -> None:
        numbers = {f"koordinator.sh/{key}": 30 for key in ("gpu-core", "gpu-memory-ratio")}
        rows = [entry(0, 30, "8Gi", 30, prefix="kubernetes.io/"), {"resources": numbers, "minor": 2}]
        shares = recorded({ALLOCATED: {"gpu": rows}}, asking(shared=2, core=60, ratio=60))
        assert [(s.card, s.core, s.ratio) for s in shares or ()] == [(Minor(0), 300, 30), (Minor(2), 300, 30)]

    def test_a_minor_of_0_may_be_left_out(self) -> None:
        shares = recorded({ALLOCATED: {"rdma": [{"resources": {RDMA: "100"}}]}}, asking(rdma=100))
        assert shares == (Share("c", Minor(0), 1000, type="rdma"),)

    def test_devices_that_nobody_asked_for_are_refused(self) -> None:
        record = {ALLOCATED: {"gpu": [entry(0, 50, "", 50)], "rdma": [{"minor": 1, "resources": {RDMA: "100"}}]}}
        with pytest.raises(BadObject, match="names 1 devices of type rdma, but the pod requests none"):
            recorded(record, asking(gpu=50))

    def test_a_row_of_a_container_that_asks_for_nothing_is_refused(self) -> None:
        record = {ALLOCATED: {"gpu": [entry(0, 50, "", 50)]}, PER_CONTAINER: {"c": {"gpu": [0]}, "d": {"gpu": [0]}}}
        with pytest.raises(BadObject, match="gives 'gpu' to container 'd', which does not request it"):
            recorded(record, asking(gpu=50), {"name": "d"})

    def test_a_minor_that_is_not_there_is_on_no_card(self) -> None:
        (share,) = recorded({ALLOCATED: {"gpu": [entry(9, 50, "", 50)]}}, asking(gpu=50)) or ()
        assert not any(share.is_on(card) for card in cards(8))


GOOD = {"gpu": [entry(0, 50, "", 50), entry(1, 50, "", 50)]}
UNREADABLE: dict[str, tuple[dict[str, object], str]] = {
    "no JSON": ({ALLOCATED: "{"}, ALLOCATED_PATH),
    "deep JSON": ({ALLOCATED: "[" * 100_000}, ALLOCATED_PATH),
    "a list": ({ALLOCATED: []}, ALLOCATED_PATH),
    "no list of devices": ({ALLOCATED: {"gpu": {}}}, ALLOCATED_PATH),
    "no device": ({ALLOCATED: {"gpu": [7]}}, ALLOCATED_PATH),
    "no resources": ({ALLOCATED: {"gpu": [{"minor": 1}]}}, ALLOCATED_PATH),
    "a minor below 0": ({ALLOCATED: {"gpu": [entry(-1)]}}, ALLOCATED_PATH),
    "no minor": ({ALLOCATED: {"gpu": [{**entry(0), "minor": True}]}}, ALLOCATED_PATH),
    "no id": ({ALLOCATED: {"gpu": [{**entry(0), "id": 7}]}}, ALLOCATED_PATH),
    "a minor twice": ({ALLOCATED: {"gpu": [entry(0), entry(0)]}}, ALLOCATED_PATH),
    "an amount below 0": ({ALLOCATED: {"gpu": [entry(0, -5)]}}, ALLOCATED_PATH),
    "no amount": ({ALLOCATED: {"gpu": [entry(0, 5, "much")]}}, ALLOCATED_PATH),
    "beyond 2^63": ({ALLOCATED: {"gpu": [entry(0, 2**63)]}}, ALLOCATED_PATH),
    "no device of the type": ({ALLOCATED: {"rdma": []}}, ALLOCATED_PATH),
    "our part alone": ({PER_CONTAINER: {"a": {"gpu": [0]}}}, PER_CONTAINER_PATH),
    "our part no JSON": ({ALLOCATED: GOOD, PER_CONTAINER: "x"}, PER_CONTAINER_PATH),
    "a container missing": ({ALLOCATED: GOOD, PER_CONTAINER: {"a": {"gpu": [0]}}}, PER_CONTAINER_PATH),
    "a container with no object": ({ALLOCATED: GOOD, PER_CONTAINER: {"a": [0], "b": {"gpu": [1]}}}, PER_CONTAINER_PATH),
    "too many": ({ALLOCATED: GOOD, PER_CONTAINER: {"a": {"gpu": [0, 1]}, "b": {"gpu": [1]}}}, PER_CONTAINER_PATH),
    "another minor": ({ALLOCATED: GOOD, PER_CONTAINER: {"a": {"gpu": [0]}, "b": {"gpu": [3]}}}, PER_CONTAINER_PATH),
    "no minor of ours": (
        {ALLOCATED: GOOD, PER_CONTAINER: {"a": {"gpu": [0]}, "b": {"gpu": [[1]]}}},
        PER_CONTAINER_PATH,
    ),
}


@pytest.mark.parametrize(("annotations", "path"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_record_names_its_annotation(annotations: dict[str, object], path: str) -> None:
    with pytest.raises(BadObject) as error:
        recorded(annotations, asking("a", gpu=50), asking("b", gpu=50))
    assert [problem.field for problem in error.value.problems] == [path]


def test_a_container_of_two_cards_has_two_different_ones() -> None:
    part = {"a": {"gpu": [0, 0]}, "b": {"gpu": [1]}}
    with pytest.raises(BadObject) as error:
        recorded({ALLOCATED: GOOD, PER_CONTAINER: part}, asking("a", gpu=200), asking("b", gpu=50))
    assert [problem.field for problem in error.value.problems] == [PER_CONTAINER_PATH]


def test_a_node_offers_percent_bytes_and_whole_cards() -> None:
    found = koord.resources((*cards(2, 16), device(0), device(4), device(1, "npu")), DEFAULT)
    percent = ((0, 100), (1, 100))
    assert found == (
        NodeResource("nvidia.com/gpu", ((0, 1), (1, 1)), as_ids=True),
        NodeResource(koord.CORE, percent, as_ids=True),
        NodeResource(koord.RATIO, percent, as_ids=True, of_memory=True),
        NodeResource(koord.MEMORY, ((0, 16 * GIB), (1, 16 * GIB)), as_ids=False, of_memory=True),
        NodeResource(koord.SHARED, percent, as_ids=False),
        NodeResource(NPU, ((1, 100),), as_ids=False, type="npu"),
        NodeResource(RDMA, ((0, 100), (4, 100)), as_ids=False, type="rdma"),
    )


class TestIsolationProvider:
    LABEL = "koordinator.sh/gpu-isolation-provider"

    def read(self, provider: str, **amounts: object) -> GpuRequest:
        raw = pod("p", asking(**amounts))
        raw["metadata"]["labels"] = {self.LABEL: provider}
        request = koord.read_request(read_pod(raw), DEFAULT)
        assert request is not None
        return request

    def test_pod_that_names_hami_core_needs_a_node_that_offers_it(self) -> None:
        request = self.read("HAMi-core", core=50, ratio=50)
        assert request.isolation == "hami-core"
        nodes = [read_node(node("n1", labels=labels)) for labels in ({}, {"mgpu.io/hami-core": "false"})]
        assert [request.unmet_requirement(one) for one in nodes] == [
            "the node does not offer HAMi-core (label mgpu.io/hami-core)"
        ] * 2
        assert request.unmet_requirement(read_node(node("n1", labels={"mgpu.io/hami-core": "true"}))) is None

    def test_other_providers_are_refused_and_name_the_label(self) -> None:
        with pytest.raises(BadObject, match=rf"metadata.labels\[{self.LABEL}\]: must be HAMi-core, not MPS"):
            self.read("MPS", core=50, ratio=50)

    def test_label_of_a_pod_without_gpus_means_nothing(self) -> None:
        assert self.read("MPS", rdma=100).isolation == ""
        assert read(asking(core=50, ratio=50)).requirements == ()
