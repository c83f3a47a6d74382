"""The slices dialect: what is asked for, what a record says, what containers see. Beside the contract suite."""

import json
from typing import Any

import pytest

from mgpu import dialects
from mgpu.dialects import slices
from mgpu.model.cards import Card, noun
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.ledger import Share, missing_cards
from mgpu.model.node_slices import read_slices, slice_devices, write_existing
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS
from mgpu.model.pods import Node, Pod, Stage, read_pod
from mgpu.model.slice_names import Slice
from mgpu.settings import load_settings
from tests.builders import GIB, cards, pod
from tests.mgpu.dialects.contract import Raw, resources

SETTINGS = load_settings()
MIG2, MIG1, MPS4 = "nvidia.com/mig-2g.20gb", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu-4gb"


def requests(name: str = "c", **amounts: int) -> Raw:
    """`asks("a", mig2=3)`."""
    of = {"mig2": MIG2, "mig1": MIG1, "mps4": MPS4}
    return {**resources(None, {of[key]: amount for key, amount in amounts.items()}), "name": name}


def read(raw: Any) -> tuple[Pod, GpuRequest]:
    request = dialects.read_request(read_pod(raw), SETTINGS)
    assert request is not None
    return read_pod(raw), request


def problems(raw: Any) -> list[str]:
    with pytest.raises(BadObject) as error:
        dialects.read_request(read_pod(raw), SETTINGS)
    return [problem.message for problem in error.value.problems]


def test_slices_are_devices_of_their_types_and_no_cards() -> None:
    raw = pod("p", requests("a", mig2=1, mig1=2), requests("b", mig2=3), init=(requests("i", mig1=1),))
    _, request = read(raw)
    assert request.containers == ()
    assert request.others == (
        ContainerRequest("i", 1, 1000, whole=True, stage=Stage.INIT, type="mig-1g.10gb"),
        ContainerRequest("a", 2, 1000, whole=True, type="mig-1g.10gb"),
        ContainerRequest("a", 1, 1000, whole=True, type="mig-2g.20gb"),
        ContainerRequest("b", 3, 1000, whole=True, type="mig-2g.20gb"),
    )


@pytest.mark.parametrize(("amounts", "mode", "other"), [({"mig2": 1}, "mig", "mps"), ({"mps4": 1}, "mps", "mig")])
def test_the_node_must_be_cut_the_way_that_is_asked_for(amounts: Any, mode: str, other: str) -> None:
    _, request = read(pod("p", requests(**amounts)))
    assert request.unmet_requirement(Node("n", {"gpu.partitioning": mode})) is None
    assert (
        request.unmet_requirement(Node("n", {"gpu.partitioning": other}))
        == f"node label gpu.partitioning is {other}, not {mode}"
    )
    assert request.unmet_requirement(Node("n")) == f"node label gpu.partitioning is not set, not {mode}"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            pod("p", requests(mig2=1), requests("d", mps4=1)),
            "is a slice of MPS, while the pod already requests slices of MIG",
        ),
        (pod("p", requests(mps4=3)), "(failRequestsGreaterThanOne); this one requests 3"),
        (pod("p", resources({"nvidia.com/gpu-2gb": 1, MPS4: 1})), "(failRequestsGreaterThanOne); this one requests 2"),
        (pod("p", resources({"nvidia.com/mig-7g.79gb": 1})), "report; request nvidia.com/mig-7g.80gb"),
        (pod("p", resources({"nvidia.com/mig-foo": 1})), "is not a slice; request one such as nvidia.com/mig-2g.20gb"),
        (pod("p", resources({"nvidia.com/gpu-0gb": 1})), "is not a slice; request one such as"),
        (pod("p", resources({"nvidia.com/mig-2222g.20gb": 1})), "is not a slice; request one such as"),
    ],
)
def test_what_is_wrong_says_the_remedy(raw: Any, message: str) -> None:
    (found,) = problems(raw)
    assert message in found


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/gpu-a100", "x.com/mig-1g.5gb"])
def test_other_resources_are_none_of_its_own(name: str) -> None:
    assert slices.read_request(read_pod(pod("p", resources({name: 1}))), SETTINGS) is None


def test_a_type_of_koordinators_is_never_a_slice() -> None:
    (message,) = problems(pod("p", resources({"koordinator.sh/mig-2g.20gb": 100})))
    assert "is not a resource of GPUs" in message


@pytest.mark.parametrize("constraint", CONSTRAINT_ANNOTATIONS)
def test_wishes_are_for_cards(constraint: str) -> None:
    value = "spread" if constraint == "mgpu.io/card-policy" else "x"
    raw = pod("p", requests(mig2=1), annotations={constraint: value})
    assert problems(raw) == [
        "is a constraint on cards, but the pod requests slices, which any card can provide; leave it out"
    ]
    assert dialects.read_bare_request(read_pod(raw), SETTINGS) is not None


def test_a_wish_takes_nothing_from_a_pod_that_has_its_slices() -> None:
    record = {slices.GIVEN: '{"c":{"mig-2g.20gb":["0:0"]}}'}
    _, request = read(pod("p", requests(mig2=1), node="n1", annotations={**record, "mgpu.io/card-models": "A100"}))
    assert request.others


def test_a_record_names_places() -> None:
    raw = pod("p", requests("a", mig2=2), requests("b", mig1=1))
    known, request = read(raw)
    others = (("mig-1g.10gb", "b", (106,)), ("mig-2g.20gb", "a", (4, 100)))
    written = slices.write_placement(known, request, Placement((), others=others), (), SETTINGS, 0)
    assert json.loads(written["mgpu.io/slices-given"]) == {
        "a": {"mig-2g.20gb": ["0:4", "1:0"]},
        "b": {"mig-1g.10gb": ["1:6"]},
    }
    (first, *_) = slices.read_placement(read_pod({**raw, "metadata": {"annotations": written}}), request) or ()
    assert first == Share("b", 106, 1000, whole=True, type="mig-1g.10gb")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("x", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"c":{}}', "mig-2g.20gb of container 'c' is missing"),
        ('{"c":7}', "mig-2g.20gb of container 'c' is missing"),
        ('{"c":{"mig-2g.20gb":["0:4"]}}', "names 1 position, but the container requests 2"),
        ('{"c":{"mig-2g.20gb":["0:4","0:4"]}}', "names a position twice"),
        ('{"c":{"mig-2g.20gb":["0:4",4]}}', "has '4', which is not a position such as 0:4"),
        ('{"c":{"mig-2g.20gb":["0:4","0:100"]}}', "has '0:100', which is not a position"),
        ('{"c":{"mig-2g.20gb":["0:4","0:\u0662"]}}', "which is not a position"),
        ('{"c":{"mig-2g.20gb":["0:4","0:2"],"gpu-4gb":["0:1"]}}', "gives 'gpu-4gb' to container 'c', which does not"),
        ('{"c":{"mig-2g.20gb":["0:4","0:2"]},"d":{"mig-2g.20gb":["0:0"]}}', "to container 'd', which does not request"),
    ],
)
def test_a_record_is_read_strictly(record: str, message: str) -> None:
    known, request = read(pod("p", requests(mig2=2), annotations={slices.GIVEN: record}))
    with pytest.raises(BadObject) as error:
        slices.read_placement(known, request)
    assert {problem.field for problem in error.value.problems} == {"metadata.annotations[mgpu.io/slices-given]"}
    assert any(message in problem.message for problem in error.value.problems)


def test_only_the_pods_record_is_its_own_annotation() -> None:
    assert dialects.is_placement_annotation("mgpu.io/slices-given")
    assert not slices.owns_annotation("mgpu.io/slices")


def cut(mode: str, *made: Slice) -> tuple[Card, ...]:
    node = Node("n", {"gpu.partitioning": mode}, {"mgpu.io/slices": write_existing(made, (0, 1), None)})
    return slice_devices(read_slices(node), cards(2))


def test_a_node_offers_one_of_each_slice_that_it_has_by_type() -> None:
    made = cut(
        "mig", Slice(0, 0, "2g.20gb", "MIG-a"), Slice(1, 4, "2g.20gb", "MIG-b"), Slice(0, 2, "1g.10gb+me", "MIG-c")
    )
    found = slices.resources((*cards(2), *made), SETTINGS)
    assert [(r.name, r.amounts, r.as_ids, r.type) for r in found] == [
        ("nvidia.com/mig-1g.10gb.me", ((2, 1),), True, "mig-1g.10gb.me"),
        (MIG2, ((0, 1), (104, 1)), True, "mig-2g.20gb"),
    ]


def test_other_vocabularies_offer_nothing_of_a_slice() -> None:
    with_slices = (*cards(2), *cut("mps", Slice(1, 1, "4gb")))
    for dialect in dialects.ALL[:-1]:
        names = [resource.name for resource in dialect.resources(cards(2), SETTINGS)]
        found = [r for r in dialect.resources(with_slices, SETTINGS) if r.name in names]
        assert found == list(dialect.resources(cards(2), SETTINGS))


def test_under_mig_a_container_sees_its_instances() -> None:
    made = cut("mig", Slice(0, 4, "2g.20gb", "MIG-a"), Slice(1, 0, "1g.10gb", "MIG-b"), Slice(1, 2, "2g.20gb", "MIG-c"))
    known, request = read(pod("p", requests(mig2=2, mig1=1)))
    assert dialects.environment_of(known, request, "c", made, cards(2)) == {
        "NVIDIA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c",
        "MGPU_CARDS": "0,1",
        "MGPU_CORE_PERCENT": "14.2",
        "MGPU_MEMORY_BYTES": str(10 * GIB),
        "MGPU_SLICES": "2g.20gb,1g.10gb,2g.20gb",
    }


def test_under_mps_a_container_sees_the_card_that_it_shares() -> None:
    known, request = read(pod("p", requests(mps4=1), requests("d")))
    assert dialects.environment_of(known, request, "c", cut("mps", Slice(1, 3, "4gb")), cards(2)) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1",
        "MGPU_CARDS": "1",
        "MGPU_CORE_PERCENT": "5",
        "MGPU_MEMORY_BYTES": str(4 * GIB),
        "MGPU_SLICES": "4gb",
    }
    assert dialects.environment_of(known, request, "d", (), cards(2)) == {}


def test_what_is_handed_to_a_container() -> None:
    _, request = read(pod("p", requests("a", mig2=1, mig1=1), requests("b", mig1=2)))
    assert [(one.type, one.cards) for one in dialects.device_requests(request, "a")] == [
        ("mig-1g.10gb", 1),
        ("mig-2g.20gb", 1),
    ]
    assert len(dialects.device_requests(request)) == 3
    _, both = read(pod("p", resources({"nvidia.com/gpu": 1, "koordinator.sh/rdma": 100})))
    assert [one.type for one in dialects.device_requests(both)] == ["gpu"]


def test_a_container_gets_its_slices_by_the_first_of_their_resources() -> None:
    (container,) = read_pod(pod("p", resources(None, {MIG2: 1, MIG1: 1, "mgpu.io/share": 1}))).containers
    assert dialects.carrier(container, SETTINGS) == MIG1
    assert dialects.carrier(container, load_settings("dialects: {slices: {enabled: false}}")) == "mgpu.io/share"


def test_a_pod_that_has_its_slices_keeps_them_when_the_dialect_is_switched_off() -> None:
    off = load_settings("dialects: {slices: {enabled: false}}")
    record = {slices.GIVEN: '{"c":{"mig-2g.20gb":["0:0"]}}'}
    running = read_pod(pod("p", requests(mig2=1), node="n1", annotations=record))
    assert dialects.read_request(running, off) == dialects.read_request(running, SETTINGS)
    assert dialects.read_request(read_pod(pod("p", requests(mig2=1))), off) is None


@pytest.mark.parametrize(
    ("type", "name"),
    [("mig-2g.20gb", "mig-2g.20gb slice"), ("gpu-4gb", "gpu-4gb slice"), ("rdma", "rdma device"), ("gpu", "card")],
)
def test_what_people_call_it(type: str, name: str) -> None:
    assert noun(type) == name


def test_a_slice_that_is_not_there_is_named_by_its_place() -> None:
    assert missing_cards([Share("c", 104, whole=True, type="mig-2g.20gb")], ()) == ("mig-2g.20gb slice 1:4",)
