"""MtgpuPods: what they say of their share, exactly, and the names of occupy pods."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import GPUID, LIMIT, MEMORY, REQUEST, MtgpuPod, parse_milli, read_mtgpupod
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Ledger
from mgpu.model.pods import read_pod
from tests.builders import GIB, card, pod
from tests.examples import examples

GOOD = {REQUEST: "0.5", LIMIT: "1.0", MEMORY: "1073741824", GPUID: "abc"}


def mtgpupod(name: str = "p", /, *, spec: Any = None, status: Any = None, **said: str | None) -> dict[str, Any]:
    """An MtgpuPod of node n1. `mtgpupod(gpu_request="0.2", gpu_mem=None)`: None leaves the annotation out."""
    changed = {f"lsalab.nthu/{key}": value for key, value in said.items()}
    annotations = {key: value for key, value in {**GOOD, **changed}.items() if value is not None}
    raw = pod(name, {"name": "c", "image": "cuda"}, annotations=annotations, node="n1")
    return {**raw, "kind": mtgpu.KIND, "spec": {**raw["spec"], **(spec or {})}, "status": status or {}}


def problems(raw: dict[str, Any]) -> list[str]:
    try:
        read_mtgpupod(raw)
    except BadObject as error:
        return [problem.field for problem in error.problems]
    return []


def path(key: str) -> str:
    return f"metadata.annotations[{key}]"


def test_the_seeds_example_is_read() -> None:
    assert read_mtgpupod(mtgpupod()) == MtgpuPod("default", "p", "uid-p", "n1", "abc", 500, 1000, GIB)


BAD_DECIMALS = [
    *("NaN", "nan", "Inf", "-Inf", "Infinity", "1e-1", "1E0", "0x1", "+0.5", "-0", "-0.5", " 0.5", "0.5 ", "0.5\n"),
    *("\t1", ".5", "1.", ".", "0.1234", "0.0000", "00.5", "01", "0,5", "0.5.0", "1_0", "½", "١", "0.١", ""),
    *("half", "0.5%", "1.001", "1.0001", "2", "9999", "1000", "1" * 5000, "0." + "1" * 5000),
]  # fmt: skip


@pytest.mark.parametrize("key", [REQUEST, LIMIT])
@pytest.mark.parametrize("value", BAD_DECIMALS, ids=lambda text: ascii(text)[:20])
def test_what_is_no_decimal_from_0_to_1_is_refused(key: str, value: str) -> None:
    raw = mtgpupod(gpu_limit="1")
    raw["metadata"]["annotations"][key] = value
    assert problems(raw) == [path(key)]


@pytest.mark.parametrize(
    ("request_", "limit"), [("0", "0.001"), ("0.0", "1"), ("1", "1.000"), ("0.25", "0.250"), ("0.999", "1.0")]
)
def test_the_ends_of_the_range_are_allowed(request_: str, limit: str) -> None:
    assert problems(mtgpupod(gpu_request=request_, gpu_limit=limit)) == []


@pytest.mark.parametrize(
    ("request_", "limit", "wrong"),
    [("0.501", "0.5", [REQUEST]), ("0", "0", [LIMIT]), ("0", "0.000", [LIMIT]), ("0.1", "0", [LIMIT, REQUEST])],
)
def test_the_request_is_at_most_the_limit_which_is_above_0(request_: str, limit: str, wrong: list[str]) -> None:
    assert problems(mtgpupod(gpu_request=request_, gpu_limit=limit)) == [path(key) for key in wrong]


BAD_BYTES = [
    "0",
    "-1",
    "+1",
    "1.0",
    "1e9",
    "1Gi",
    " 1",
    "1 ",
    "007",
    "",
    "NaN",
    "١",
    "9" * 20,
    str(mtgpu.MAX_MEMORY + 1),
]


@pytest.mark.parametrize("value", BAD_BYTES, ids=lambda text: ascii(text)[:20])
def test_memory_is_a_positive_number_of_bytes(value: str) -> None:
    assert problems(mtgpupod(gpu_mem=value)) == [path(MEMORY)]


def test_the_most_memory_is_read_exactly() -> None:
    assert read_mtgpupod(mtgpupod(gpu_mem=str(mtgpu.MAX_MEMORY))).memory == mtgpu.MAX_MEMORY


@pytest.mark.parametrize("value", ["", "ABC", "a-b", "a.b", "a b", "a/b", "ä", "a\n", "a" * 64], ids=ascii)
def test_a_gpuid_is_lower_case_letters_and_digits(value: str) -> None:
    assert problems(mtgpupod(GPUID=value)) == [path(GPUID)]


def test_everything_is_required_and_every_problem_named_at_once() -> None:
    raw = mtgpupod(gpu_request=None, gpu_limit=None, gpu_mem=None, GPUID=None, spec={"nodeName": "", "containers": []})
    assert problems(raw) == [*(path(key) for key in mtgpu.ANNOTATIONS), "spec.nodeName", "spec.containers"]


@pytest.mark.parametrize("name", ["N1", "n_1", "n1/../n2", "-n", "n-", "n..1", ".n", "n1\n", "n" * 254])
def test_a_node_has_the_name_of_a_node(name: str) -> None:
    assert problems(mtgpupod(spec={"nodeName": name})) == ["spec.nodeName"]


def test_the_occupy_pod_must_be_nameable() -> None:
    room = 253 - len(mtgpu.occupy_name("", "abc"))
    assert problems(mtgpupod(spec={"nodeName": "n" * room})) == []
    assert problems(mtgpupod(spec={"nodeName": "n" * (room + 1)})) == ["spec.nodeName"]


GPU_IN_THE_SPEC = {
    "a whole card": ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "resources.limits[nvidia.com/gpu]"),
    "a share": (
        {"resources": {"requests": {"aliyun.com/gpu-mem": 1}, "limits": {"aliyun.com/gpu-mem": 1}}},
        "resources.requests[aliyun.com/gpu-mem]",
    ),
    "none of it": ({"resources": {"requests": {"koordinator.sh/gpu": 0}}}, "resources.requests[koordinator.sh/gpu]"),
    "a carrier": ({"resources": {"limits": {"mgpu.io/share": 1}}}, "resources.limits[mgpu.io/share]"),
    "its own devices": (
        {"env": [{"name": "A"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
        "env[NVIDIA_VISIBLE_DEVICES]",
    ),
}


@pytest.mark.parametrize(("part", "where"), GPU_IN_THE_SPEC.values(), ids=GPU_IN_THE_SPEC)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_the_spec_asks_for_no_gpu_itself(kind: str, part: dict[str, Any], where: str) -> None:
    asking = {"name": "x", **part}
    lists = {"containers": [{"name": "c"}]} | {kind: [asking] if kind == "initContainers" else [{"name": "c"}, asking]}
    position = 0 if kind == "initContainers" else 1
    assert problems(mtgpupod(spec=lists)) == [f"spec.{kind}[{position}].{where}"]


def test_cpu_and_memory_may_be_asked_for() -> None:
    amounts = {"cpu": "1", "memory": "500Mi", "example.com/fpga": 1}
    assert problems(mtgpupod(spec={"containers": [{"name": "c", "resources": {"limits": amounts}}]})) == []


def test_wishes_are_for_those_that_do_not_name_their_card() -> None:
    raw = mtgpupod()
    raw["metadata"]["annotations"]["mgpu.io/card-models"] = "A100"
    assert problems(raw) == [path("mgpu.io/card-models")]


def test_one_that_has_its_card_is_held_to_what_its_account_is_made_of() -> None:
    bound = {"BoundDeviceID": "GPU-1", "PodObjectMeta": {"uid": "u"}, "phase": "Running"}
    strange = {"nodeName": "N_1", "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}
    raw = mtgpupod(spec=strange, status=bound)
    raw["metadata"]["annotations"]["mgpu.io/card-models"] = "A100"
    found = read_mtgpupod(raw)
    assert (found.card_uuid, found.pod_uid, found.phase, found.node) == ("GPU-1", "u", "Running", "N_1")
    assert problems(mtgpupod(gpu_mem="x", spec={"nodeName": ""}, status=bound)) == [path(MEMORY), "spec.nodeName"]


def test_json_of_a_wrong_type_is_a_bad_object() -> None:
    assert problems({"metadata": {"annotations": {REQUEST: 0.5}}}) == [path(REQUEST)]


def test_every_thousandth_reads_back_however_it_is_written() -> None:
    for value in range(1001):
        text = f"{value // 1000}.{value % 1000:03}"
        written = [text, *(text[:-cut] for cut in (1, 2) if text.endswith("0" * cut))]
        if value % 1000 == 0:
            written.append(str(value // 1000))
        assert {parse_milli(one) for one in written} == {value}


@given(st.text(alphabet="0123456789.+-eE ", max_size=7) | st.decimals(allow_nan=True).map(str) | st.floats().map(str))
@examples(166)
def test_property_a_decimal_that_is_read_means_itself(text: str) -> None:
    found = parse_milli(text)
    if found is not None:
        whole, _, places = text.partition(".")
        assert found * 10 ** len(places) == int(whole + places) * 1000
        assert len(places) <= 3


def test_two_four_three_and_one_tenths_fit_one_card_exactly() -> None:
    """As floats they make 1.0000000000000002 in this order, and 0.9999999999999999 in others."""
    pods = [read_mtgpupod(mtgpupod(f"p{i}", gpu_request=f"0.{i}", gpu_mem="1")) for i in (2, 4, 3, 1)]
    ledger = Ledger()
    ledger.set_cards("n1", (card(0),))
    for one in pods:
        ledger.hold(mtgpu.holding(one, card(0).uuid))
    (state,) = ledger.cards("n1")
    assert (state.gpuid, state.core_left, state.memory_left) == ("abc", 0, card(0).memory - 4)


def test_what_its_containers_see() -> None:
    seen = mtgpu.environment(read_mtgpupod(mtgpupod(gpu_request="0.125")), card(2).uuid, 2)
    assert seen == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-2",
        "MGPU_CARDS": "2",
        "MGPU_CORE_PERCENT": "12.5",
        "MGPU_MEMORY_BYTES": str(GIB),
    }


OCCUPY = pod("mtgpupod-occupypod-n-1.example-abc", namespace="kube-system")


@pytest.mark.parametrize(
    ("over", "found"),
    [
        ({}, ("n-1.example", "abc")),
        ({"namespace": "default"}, None),
        ({"labels": {}}, None),
        ({"labels": {mtgpu.OCCUPY_LABEL: "other"}}, None),
        ({"labels": {mtgpu.OCCUPY_LABEL: "A"}}, None),
        ({"name": "mtgpupod-occupypod--abc"}, None),
        ({"name": "mtgpupod-occupypod-abc"}, None),
        ({"name": "mine-n-1.example-abc"}, None),
    ],
)
def test_an_occupy_pod_is_known_by_namespace_label_and_exact_name(over: Any, found: Any) -> None:
    meta = {**OCCUPY["metadata"], "labels": {mtgpu.OCCUPY_LABEL: "abc"}, **over}
    assert mtgpu.occupy_target(read_pod({**OCCUPY, "metadata": meta})) == found
