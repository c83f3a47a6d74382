"""mgpu.md, rule by rule."""

from typing import Any

import pytest

from mgpu import dialects
from mgpu.dialects import mgpu
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, whole_cards
from mgpu.model.ledger import Share
from mgpu.model.pods import Node, Stage, read_pod
from mgpu.settings import Settings, load_settings
from tests.builders import CORE, GIB, MEMORY, cards, container, pod, share
from tests.mgpu.dialects.contract import resources

DEFAULT = load_settings("")
MIB = 1 << 20
Raw = dict[str, Any]


def read(raw: Raw, settings: Settings = DEFAULT) -> GpuRequest:
    request = mgpu.read_request(read_pod(raw), settings)
    assert request is not None
    return request


def refused(raw: Raw, settings: Settings = DEFAULT) -> list[str]:
    with pytest.raises(BadObject) as error:
        mgpu.read_request(read_pod(raw), settings)
    return [str(problem) for problem in error.value.problems]


def multiple(entries: str, *containers: Raw, policy: str = "native-burst-share", **more: Any) -> Raw:
    annotations = {mgpu.MULTIPLE: entries, mgpu.COMPUTE_POLICY: policy}
    return pod("p", *containers, annotations=annotations, **more)


REQUESTS = "spec.containers[0].resources.requests"
LIST = f"metadata.annotations[{mgpu.MULTIPLE}]"


class TestAsk:
    def test_core_is_percent_and_memory_is_mib(self) -> None:
        assert read(share("p", 30, 4069)).containers == (ContainerRequest("c", 1, 300, 4069 * MIB),)

    def test_6k_is_6000_mib(self) -> None:
        assert read(pod("p", container("c", 20, "6k"))).containers[0].memory == 6000 * MIB

    def test_hundreds_are_whole_cards(self) -> None:
        assert read(pod("p", container("a", 100), container("b", 300))).containers == (
            whole_cards("a", 1),
            whole_cards("b", 3),
        )

    def test_a_multiple_pods_totals_are_divided_by_its_cards(self) -> None:
        raw = multiple("2,1,0", container("a", 100, 4096), container("b", 30, 512), container("c"))
        assert read(raw).containers == (
            ContainerRequest("a", 2, 500, 2 * GIB),
            ContainerRequest("b", 1, 300, 512 * MIB),
        )

    def test_100_per_card_of_a_multiple_pod_is_whole_cards(self) -> None:
        assert read(multiple("3", container("a", 300))).containers == (whole_cards("a", 3),)

    def test_init_containers_follow_the_normal_rules_beside_a_list(self) -> None:
        raw = multiple("2", container("a", 100, 4096), init=(container("i", 200),))
        assert read(raw).containers == (whole_cards("i", 2, Stage.INIT), ContainerRequest("a", 2, 500, 2 * GIB))

    def test_sixteen_cards_are_the_most(self) -> None:
        assert read(pod("p", container("c", 1600))).containers[0].cards == 16
        assert "at most 16" in refused(pod("p", container("c", 1700)))[0]

    def test_at_most_so_many_containers_on_a_card(self) -> None:
        assert read(share()).max_shares == 16
        few = load_settings("dialects: {mgpu: {MGPUMaxContainersPerCard: 4}}")
        assert read(share(), few).max_shares == 4

    def test_a_list_of_zeros_alone_asks_for_nothing(self) -> None:
        assert mgpu.read_request(read_pod(multiple("0,0", container("a"), container("b"))), DEFAULT) is None


class TestTheSeedsEightInvalidPods:
    """docs/design/mgpu.md, "Validation", with the amounts written there."""

    def test_normal_1_not_positive(self) -> None:
        assert refused(pod("p", resources({CORE: "-20", MEMORY: "6k"}))) == [
            f"{REQUESTS}[{CORE}]: must be greater than 0, not -20"
        ]

    def test_normal_2_too_little_memory(self) -> None:
        """The YAML of the seed breaks rule 3 instead; with the core of the rule's text it breaks rule 2."""
        assert refused(pod("p", resources({CORE: "120", MEMORY: "128"}))) == [
            f"{REQUESTS}[{CORE}]: above 100 must be a multiple of 100 (whole cards), not 120"
        ]
        assert refused(pod("p", resources({CORE: "20", MEMORY: "128"}))) == [
            f"{REQUESTS}[{MEMORY}]: must be at least 256 (MiB) for a share of a card, not 128"
        ]

    def test_normal_3_more_than_a_card_but_no_full_cards(self) -> None:
        assert "multiple of 100" in refused(pod("p", resources({CORE: "120"})))[0]

    def test_normal_4_full_cards_with_memory(self) -> None:
        (problem,) = refused(pod("p", resources({CORE: "200", MEMORY: "6k"})))
        assert problem.startswith(f"{REQUESTS}[{MEMORY}]: must not be set for whole cards")

    def test_multiple_1_list_and_containers_differ_in_number(self) -> None:
        problems = refused(multiple("3,2", container("c", 200, "6k")))
        assert problems[0] == (f"{LIST}: must have one entry per container of spec.containers: 2 entries, 1 container")
        assert problems[1:] == [f"{REQUESTS}[{CORE}]: must be divisible by the number of cards: 200 over 3 cards"]

    def test_multiple_2_a_negative_number_of_cards(self) -> None:
        problems = refused(multiple("-1,2", container("c", 200, "6k")))
        assert problems[0] == f"{LIST}: entry 0 must be an integer of at least 0, not '-1'"
        assert len(problems) == 2
        assert "2 entries, 1 container" in problems[1]

    def test_multiple_3_full_cards_with_memory(self) -> None:
        (problem,) = refused(multiple("2", container("c", 200, "6k")))
        assert problem.startswith(f"{REQUESTS}[{MEMORY}]: must not be set for whole cards")

    def test_multiple_4_not_divisible(self) -> None:
        assert refused(multiple("3", container("c", 130, "6k"))) == [
            f"{REQUESTS}[{CORE}]: must be divisible by the number of cards: 130 over 3 cards"
        ]


class TestValidation:
    @pytest.mark.parametrize(
        ("core", "mib", "field", "says"),
        [
            (0, 1024, CORE, "must be greater than 0"),
            (-1, None, CORE, "must be greater than 0"),
            (50, 0, MEMORY, "must be greater than 0"),
            (50, -5, MEMORY, "must be greater than 0"),
            (None, 1024, CORE, "must be set where"),
            (50, None, MEMORY, "must be at least 256"),
            (50, 255, MEMORY, "must be at least 256"),
            (101, None, CORE, "multiple of 100"),
            (150, 1024, CORE, "multiple of 100"),
            (100, 1024, MEMORY, "must not be set for whole cards"),
            ("500m", 1024, CORE, "fraction"),
            (50, "1.5", MEMORY, "fraction"),
            ("lots", 1024, CORE, "not a quantity"),
            (50, "9E", MEMORY, "more than any node has"),
        ],
    )
    def test_normal(self, core: object, mib: object, field: str, says: str) -> None:
        (problem,) = refused(pod("p", container("c", core, mib)))
        assert problem.startswith(f"{REQUESTS}[{field}]: ")
        assert says in problem

    @pytest.mark.parametrize(("core", "mib"), [(1, 256), (99, 256), (50, "1k"), (100, None), (1600, None)])
    def test_normal_and_valid(self, core: object, mib: object) -> None:
        assert read(pod("p", container("c", core, mib)))

    @pytest.mark.parametrize(
        ("entries", "core", "mib", "field", "says"),
        [
            ("0", 50, 1024, LIST, "gives 0 to container 'c', which requests GPU"),
            ("1", None, None, LIST, "gives 1 to container 'c', which requests no GPU"),
            ("1,", 50, 1024, LIST, "entry 1 must be an integer"),
            ("", 50, 1024, LIST, "entry 0 must be an integer"),
            ("1.5", 50, 1024, LIST, "entry 0 must be an integer"),
            ("+1", 50, 1024, LIST, "entry 0 must be an integer"),
            ("٢", 50, 1024, LIST, "entry 0 must be an integer"),
            ("99999999999", 50, 1024, LIST, "entry 0 must be an integer"),
            ("2", 100, 511, f"{REQUESTS}[{MEMORY}]", "divisible"),
            ("2", 100, 510, f"{REQUESTS}[{MEMORY}]", "must be at least 256 (MiB) per card: 510 over 2 cards"),
            ("2", 100, None, f"{REQUESTS}[{MEMORY}]", "must be at least 256 (MiB) per card: 0 over 2 cards"),
            ("2", 99, 1024, f"{REQUESTS}[{CORE}]", "divisible"),
            ("2", 202, 1024, f"{REQUESTS}[{CORE}]", "at most 100 per card"),
            ("1", 120, 1024, f"{REQUESTS}[{CORE}]", "at most 100 per card"),
            ("17", 1700, None, f"{REQUESTS}[{CORE}]", "at most 16"),
            ("2", 0, 1024, f"{REQUESTS}[{CORE}]", "greater than 0"),
            ("2", None, 1024, f"{REQUESTS}[{CORE}]", "must be set where"),
        ],
    )
    def test_multiple(self, entries: str, core: object, mib: object, field: str, says: str) -> None:
        problems = refused(multiple(entries, container("c", core, mib)))
        assert any(problem.startswith(f"{field}: ") and says in problem for problem in problems), problems

    @pytest.mark.parametrize(
        ("entries", "core", "mib"), [("2", 100, 512), ("2", 200, None), ("1", 100, None), ("16", 1600, None)]
    )
    def test_multiple_and_valid(self, entries: str, core: object, mib: object) -> None:
        assert read(multiple(entries, container("c", core, mib)))

    def test_an_unusable_list_does_not_make_the_pod_a_normal_one(self) -> None:
        assert len(refused(multiple("x", container("c", 130, 1024)))) == 1

    def test_entries_that_belong_to_no_container_are_told_by_their_number(self) -> None:
        found = refused(multiple("x," * 1000, container("c", 130, 1024)))
        assert [problem.partition(": ")[2][:7] for problem in found] == ["entry 0", "entry 1", "must ha"]

    def test_unknown_compute_policy(self) -> None:
        (problem,) = refused(share(annotations={mgpu.COMPUTE_POLICY: "best-effort"}))
        assert problem.startswith(
            f"metadata.annotations[{mgpu.COMPUTE_POLICY}]: must be one of fixed-share, guaranteed"
        )

    def test_init_containers_obey_the_rules_of_normal_containers(self) -> None:
        raw = multiple("2", container("a", 100, 4096), init=(container("i", 130, 1024),))
        assert refused(raw) == [
            f"spec.initContainers[0].resources.requests[{CORE}]: above 100 must be a multiple of 100 "
            "(whole cards), not 130"
        ]

    def test_all_problems_at_once(self) -> None:
        raw = multiple("2,1", container("a", 0, -1), container("b"), policy="nope")
        assert [problem.split(": ")[0] for problem in refused(raw)] == [
            f"metadata.annotations[{mgpu.COMPUTE_POLICY}]",
            f"{REQUESTS}[{CORE}]",
            f"{REQUESTS}[{MEMORY}]",
            LIST,
        ]

    def test_the_least_memory_is_a_setting(self) -> None:
        little = load_settings("dialects: {mgpu: {minGPUMemory: 64}}")
        assert read(share("p", 50, 64), little)
        assert "must be at least 64" in refused(share("p", 50, 63), little)[0]

    def test_limits_alone_are_named_as_limits(self) -> None:
        (problem,) = refused(pod("p", resources(None, {CORE: "50"})))
        assert problem.startswith(f"spec.containers[0].resources.limits[{MEMORY}]: ")

    def test_a_name_too_long_for_the_annotation_that_records_its_cards(self) -> None:
        """An annotation name has at most 63 characters; a longer one would break every later write of the pod."""
        assert read(pod("p", container("c" * 43, 50, 1024)))
        (problem,) = refused(pod("p", container("c" * 44, 50, 1024)))
        assert problem.startswith("spec.containers[0].name: must be at most 43 characters")
        assert mgpu.read_request(read_pod(pod("p", container("c" * 63))), DEFAULT) is None


def node(policy: str | None = None, schedule: str | None = "mgpu") -> Node:
    labels = {mgpu.NODE_LABEL: schedule, mgpu.COMPUTE_POLICY: policy}
    return Node("n1", labels={key: value for key, value in labels.items() if value is not None})


class TestFilter:
    def unmet(self, raw: Raw, on: Node) -> str | None:
        return read(raw).unmet_requirement(on)

    def test_the_label_makes_a_node_serve(self) -> None:
        assert self.unmet(share(), node()) is None
        assert self.unmet(share(), node(schedule=None)) == f"node label {mgpu.NODE_LABEL} is not set, not mgpu"
        assert "is nvidia, not mgpu" in (self.unmet(share(), node(schedule="nvidia")) or "")

    @pytest.mark.parametrize("policy", mgpu.COMPUTE_POLICIES)
    def test_a_normal_pods_policy_equals_the_nodes(self, policy: str) -> None:
        raw = share(annotations={mgpu.COMPUTE_POLICY: policy})
        for other in mgpu.COMPUTE_POLICIES:
            assert (self.unmet(raw, node(other)) is None) == (other == policy)

    def test_both_default_to_fixed_share(self) -> None:
        explicit = share(annotations={mgpu.COMPUTE_POLICY: "fixed-share"})
        assert self.unmet(explicit, node()) is None
        assert self.unmet(share(), node("fixed-share")) is None
        assert self.unmet(share(), node("native-burst-share")) == (
            "node's compute policy is native-burst-share, the pod's is fixed-share"
        )

    def test_whole_cards_are_exempt(self) -> None:
        assert self.unmet(pod("p", container("c", 200)), node("native-burst-share")) is None
        mixed = pod("p", container("a", 200), container("b", 50, 1024))
        assert self.unmet(mixed, node("native-burst-share")) is not None

    def test_a_multiple_pod_and_its_node_are_both_native_burst_share(self) -> None:
        raw = multiple("2", container("c", 100, 1024))
        assert self.unmet(raw, node("native-burst-share")) is None
        assert "container-multiple-gpu needs native-burst-share" in (self.unmet(raw, node()) or "")

    @pytest.mark.parametrize("policy", ["fixed-share", "guaranteed-burst-share"])
    def test_a_multiple_pod_of_another_policy_fits_no_node(self, policy: str) -> None:
        raw = multiple("2", container("c", 100, 1024), policy=policy)
        for there in mgpu.COMPUTE_POLICIES:
            assert policy in (self.unmet(raw, node(there)) or "")

    def test_a_multiple_pod_of_whole_cards_is_not_exempt(self) -> None:
        assert self.unmet(multiple("2", container("c", 200)), node()) is not None


class TestRecord:
    request = GpuRequest("mgpu", (ContainerRequest("c1", 1, 500, GIB), ContainerRequest("c2", 2, 500, GIB)))
    raw = pod("p", container("c1", 50, 1024), container("c2", 100, 2048))

    def written(self, settings: str = "") -> dict[str, str]:
        placement = Placement((("c1", (1,)), ("c2", (0, 2))))
        return mgpu.write_placement(read_pod(self.raw), self.request, placement, cards(3), load_settings(settings), 0)

    def recorded(self, annotations: dict[str, str], raw: Raw | None = None, request: GpuRequest | None = None) -> Any:
        given = {**(raw or self.raw)}
        given["metadata"] = {**given["metadata"], "annotations": annotations}
        shares = mgpu.read_placement(read_pod(given), request or self.request)
        return shares if shares is None else [(s.container, s.card) for s in shares]

    def test_index_mode(self) -> None:
        assert self.written() == {
            "vke.volcengine.com/assumed": "true",
            "vke.volcengine.com/gpu-index-container-c1": "1",
            "vke.volcengine.com/gpu-index-container-c2": "0,2",
        }

    def test_id_mode(self) -> None:
        written = self.written("dialects: {mgpu: {MGPUScheduleMode: id}}")
        assert written["vke.volcengine.com/gpu-index-container-c2"] == "GPU-n1-0,GPU-n1-2"
        assert self.recorded(written) == [("c1", "GPU-n1-1"), ("c2", "GPU-n1-0"), ("c2", "GPU-n1-2")]

    def test_amounts_come_from_the_ask(self) -> None:
        raw = {**self.raw, "metadata": {"name": "p", "annotations": self.written()}}
        shares = mgpu.read_placement(read_pod(raw), self.request)
        assert shares is not None
        assert shares[0] == Share("c1", 1, 500, GIB)

    def test_positions_as_the_seeds_first_example_writes_them(self) -> None:
        assert self.recorded({mgpu.INDEX_PREFIX + "0": "2", mgpu.INDEX_PREFIX + "1": "1, 0"}) == [
            ("c1", 2),
            ("c2", 1),
            ("c2", 0),
        ]

    def test_a_name_wins_over_a_position(self) -> None:
        both = {mgpu.INDEX_PREFIX + "c1": "1", mgpu.INDEX_PREFIX + "0": "2", mgpu.INDEX_PREFIX + "c2": "0,2"}
        assert self.recorded(both) == [("c1", 1), ("c2", 0), ("c2", 2)]

    def test_a_name_that_looks_like_another_containers_position(self) -> None:
        raw = pod("p", container("1", 50, 1024), container("0", 50, 1024))
        request = GpuRequest("mgpu", (ContainerRequest("1", 1, 500, GIB), ContainerRequest("0", 1, 500, GIB)))
        annotations = {mgpu.INDEX_PREFIX + "0": "3", mgpu.INDEX_PREFIX + "1": "4"}
        assert self.recorded(annotations, raw, request) == [("1", 4), ("0", 3)]

    def test_a_position_that_is_another_containers_name_is_never_used(self) -> None:
        raw = pod("p", container("1", 50, 1024), container("c", 50, 1024))
        request = GpuRequest("mgpu", (ContainerRequest("1", 1, 500, GIB), ContainerRequest("c", 1, 500, GIB)))
        with pytest.raises(BadObject, match=r"gpu-index-container-c\]: is missing"):
            self.recorded({mgpu.INDEX_PREFIX + "1": "4"}, raw, request)

    def test_init_containers_have_no_position(self) -> None:
        raw = pod("p", container("c"), init=(container("i", 50, 1024),))
        request = GpuRequest("mgpu", (ContainerRequest("i", 1, 500, GIB, stage=Stage.INIT),))
        with pytest.raises(BadObject, match="is missing"):
            self.recorded({mgpu.INDEX_PREFIX + "0": "4"}, raw, request)

    @pytest.mark.parametrize("name", ["other", "2", "", "i"])
    def test_a_row_for_a_container_that_asks_for_nothing_is_refused(self, name: str) -> None:
        with pytest.raises(BadObject) as error:
            self.recorded({**self.written(), mgpu.INDEX_PREFIX + name: "0"})
        (problem,) = error.value.problems
        assert problem.field == f"metadata.annotations[{mgpu.INDEX_PREFIX}{name}]"

    def test_no_record(self) -> None:
        assert self.recorded({}) is None
        assert self.recorded({mgpu.MULTIPLE: "1,2"}) is None

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("", "neither a card index nor a UUID"),
            ("x", "neither a card index nor a UUID"),
            ("-1", "neither a card index nor a UUID"),
            ("0,,1", "neither a card index nor a UUID"),
            ("1e0", "neither a card index nor a UUID"),
            ("0,0", "names a card twice"),
            ("0", "names 1 cards, but the container requests 2"),
            ("0,1,2", "names 3 cards, but the container requests 2"),
        ],
    )
    def test_an_unreadable_record(self, value: str, says: str) -> None:
        with pytest.raises(BadObject) as error:
            self.recorded({mgpu.INDEX_PREFIX + "c1": "0", mgpu.INDEX_PREFIX + "c2": value})
        (problem,) = error.value.problems
        assert problem.field == f"metadata.annotations[{mgpu.INDEX_PREFIX}c2]"
        assert says in problem.message

    def test_half_a_record_is_none(self) -> None:
        with pytest.raises(BadObject) as error:
            self.recorded({mgpu.ASSUMED: "true"})
        assert len(error.value.problems) == 2

    def test_a_uuid_that_could_not_be_read_back_is_written_as_its_index(self) -> None:
        odd = tuple(type(card)(card.index, "a,b", "", GIB) for card in cards(1))
        request, placement = GpuRequest("mgpu", (ContainerRequest("c"),)), Placement((("c", (0,)),))
        mode = load_settings("dialects: {mgpu: {MGPUScheduleMode: id}}")
        written = mgpu.write_placement(read_pod(share()), request, placement, odd, mode, 0)
        assert written[mgpu.INDEX_PREFIX + "c"] == "0"


class TestSettings:
    def test_binpack_unless_set(self) -> None:
        request = read(share())
        assert dialects.card_policy(request, DEFAULT) == "binpack"
        assert dialects.card_policy(request, load_settings("dialects: {mgpu: {MGPUPolicy: Spread}}")) == "spread"

    def test_mgpu_enable_false_is_off(self) -> None:
        off = load_settings("dialects: {mgpu: {MGPUEnable: false}}")
        assert dialects.read_request(read_pod(share()), off) is None


def test_a_node_offers_percent_as_ids_and_mib_as_a_number() -> None:
    core, memory = mgpu.resources(cards(2, gib=80), DEFAULT)
    assert (core.name, core.amounts, core.as_ids) == (CORE, ((0, 100), (1, 100)), True)
    assert (memory.name, memory.amounts, memory.as_ids) == (MEMORY, ((0, 81920), (1, 81920)), False)
