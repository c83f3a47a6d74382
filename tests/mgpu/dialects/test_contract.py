"""The contract of contract.py, for every dialect of the registry."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import dialects
from mgpu.dialects.registry import vocabularies, vocabulary_of
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, peak
from mgpu.model.groups import Group
from mgpu.model.ledger import Share, shares_of
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS, NO_CONSTRAINTS
from mgpu.model.pods import read_pod
from mgpu.settings import Settings, load_settings
from tests.builders import CORE, cards, container, pod
from tests.mgpu.dialects.contract import CASES, MIG_SLICES, MPS_SLICES, Case, Raw, resources

DEFAULT = load_settings("")
NODE_CARDS = cards(8)
OTHER_DEVICES = tuple(Card(i, f"{t}-{i}", "", 0, minor=i, type=t) for t in ("fpga", "rdma") for i in range(4))
SLICE_DEVICES = tuple(
    Card(100 * i, f"{name}-{i}", NODE_CARDS[i].model, 20 << 30, 250, minor=100 * i, type=name)
    for name in sorted(r.removeprefix("nvidia.com/") for r in (*MIG_SLICES, *MPS_SLICES))
    for i in range(4)
)
DEVICES = (*NODE_CARDS, *OTHER_DEVICES, *SLICE_DEVICES)

every_dialect = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
WISHING = {name: case for name, case in CASES.items() if case.constraints}
every_dialect_with_wishes = pytest.mark.parametrize("case", WISHING.values(), ids=WISHING.keys())


def of(case: Case) -> dialects.Dialect:
    return dialects.by_name(case.name)


def read(case: Case, raw: Raw, settings: Settings = DEFAULT) -> GpuRequest:
    request = of(case).read_request(read_pod(raw), settings)
    assert request is not None
    return request


def with_annotations(raw: Raw, annotations: Any) -> Raw:
    meta = raw["metadata"]
    return {**raw, "metadata": {**meta, "annotations": {**meta["annotations"], **annotations}}}


def test_every_dialect_of_the_registry_has_its_case() -> None:
    assert list(CASES) == [dialect.NAME for dialect in dialects.ALL]


@every_dialect
def test_a_pod_that_asks_for_nothing_is_not_its_own(case: Case) -> None:
    for raw in (pod("p", container("c")), pod("p"), pod("p", container("c", memory="1Gi"))):
        assert of(case).read_request(read_pod(raw), DEFAULT) is None


@every_dialect
def test_a_malformed_pod_names_its_fields(case: Case) -> None:
    for title, (raw, paths) in case.malformed.items():
        with pytest.raises(BadObject) as error:
            of(case).read_request(read_pod(raw), DEFAULT)
        assert tuple(problem.field for problem in error.value.problems) == paths, title
        assert all(exists(raw, path) for path in paths), title


def exists(raw: Raw, path: str) -> bool:
    """Whether the pod has the field of this path: `a.b[0].c[some/key.with.dots]`."""
    here: Any = raw
    while path:
        if path.startswith("["):
            key, path = path[1:].split("]", 1)
            here = here[int(key)] if isinstance(here, list) else here.get(key)
        else:
            cut = min((at for at in (path.find("."), path.find("[")) if at >= 0), default=len(path))
            here, path = here.get(path[:cut]), path[cut:]
        path = path.removeprefix(".")
        if here is None:
            return False
    return True


@every_dialect
def test_equivalent_pods_ask_for_the_same(case: Case) -> None:
    for title, group in case.equal.items():
        first, *others = (read(case, raw) for raw in group)
        assert all(request == first for request in others), title


@every_dialect
@given(data=st.data())
def test_property_an_ask_is_sound(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    request = read(case, raw)
    names = [c.container for c in request.containers]
    started = [c.name for c in read_pod(raw).containers]
    assert request.dialect == case.name
    assert names == [name for name in started if name in names]
    assert all(wanted.type != "gpu" and wanted.container in started for wanted in request.others)
    assert len({(wanted.type, wanted.container) for wanted in request.others}) == len(request.others)
    for wanted in (*request.containers, *request.others):
        assert wanted.cards >= 1
        assert 0 <= wanted.core <= 1000
        assert (wanted.core, wanted.memory) == (1000, 0) if wanted.whole else wanted.memory >= 0


@every_dialect
@given(data=st.data())
def test_property_a_record_reads_back_as_the_placement(case: Case, data: st.DataObject) -> None:
    """In every mode; and reading needs no settings, so that a record outlives a change of mode."""
    raw = data.draw(case.pods)
    for settings in case.settings.values():
        request = read(case, raw, settings)
        placement = placed(data, request)
        record = of(case).write_placement(read_pod(raw), request, placement, DEVICES, settings, 0)
        shares = of(case).read_placement(read_pod(with_annotations(raw, record)), request)
        assert shares is not None
        assert {on_card(share) for share in shares} == set(shares_of(request, placement))
        assert all(of(case).owns_annotation(key) for key in record)
        assert all(dialects.is_placement_annotation(key) for key in record)
        assert all(isinstance(value, str) and len(key.split("/")[-1]) <= 63 for key, value in record.items())


def placed(data: st.DataObject, request: GpuRequest) -> Placement:
    def some(wanted: ContainerRequest) -> tuple[int, ...]:
        of = [device.index for device in DEVICES if device.type == wanted.type]
        return tuple(sorted(data.draw(st.permutations(of))[: wanted.cards]))

    return Placement(
        tuple((c.container, some(c)) for c in request.containers),
        others=tuple((c.type, c.container, some(c)) for c in request.others),
    )


def on_card(share: Share) -> Share:
    """The share with its card's index, however the record names the card."""
    return replace(share, card=next(card.index for card in DEVICES if share.is_on(card)))


@every_dialect
@given(data=st.data())
def test_property_no_record_is_none_and_garbage_is_a_bad_object(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    request = read(case, raw)
    assert of(case).read_placement(read_pod(raw), request) is None
    record = of(case).write_placement(read_pod(raw), request, placed(data, request), DEVICES, DEFAULT, 0)
    garbage = with_annotations(raw, case.unreadable(record))
    with pytest.raises(BadObject) as error:
        of(case).read_placement(read_pod(garbage), request)
    assert all(exists(garbage, problem.field) for problem in error.value.problems)


@every_dialect
@given(data=st.data())
def test_property_no_altered_record_gives_other_amounts_than_the_request(case: Case, data: st.DataObject) -> None:
    """Whatever a record says, it is refused or names cards alone: the pod holds what it requests."""
    raw = data.draw(case.pods)
    request = read(case, raw)
    record = of(case).write_placement(read_pod(raw), request, placed(data, request), DEVICES, DEFAULT, 0)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(record)))
        record = {**record, key: data.draw(altered(record[key]))}
    left_out = data.draw(st.none() | st.sampled_from(sorted(record)))
    record = {key: value for key, value in record.items() if key != left_out}
    try:
        shares = dialects.read_placement(read_pod(with_annotations(raw, record)), request)
    except BadObject:
        return
    if shares is not None:
        asked, rounding = held(shares_of(request, placed(data, request))), len(shares)
        assert held(shares).keys() == asked.keys()
        for type, (core, memory, ratio) in held(shares).items():
            assert (core, ratio) == (asked[type][0], asked[type][2])
            assert asked[type][1] - rounding <= memory <= asked[type][1]


def held(shares: Sequence[Share]) -> dict[str, tuple[int, int, int]]:
    """By type the core, memory and ratio that the shares have together at the pod's busiest moment, as they say."""
    found: dict[str, tuple[int, int, int]] = {}
    for type in {share.type for share in shares}:
        uses = (
            (s.stage, Amount(s.core, s.memory, 0, 100 if s.whole else s.ratio or 0)) for s in shares if s.type == type
        )
        core, memory, _, ratio = peak(uses)
        found[type] = (core, memory, ratio)
    return found


@st.composite
def altered(draw: st.DrawFn, text: str) -> str:
    """A record's value with one part of it changed, added or left out."""
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        parts = text.split(",")
        return draw(st.sampled_from([",".join(parts[1:]), f"{text},7", f"{text},{parts[0]}", "GPU-x", "7", "MiB"]))
    path = draw(st.sampled_from(sorted(_paths(table), key=len, reverse=True)))
    return json.dumps(_replaced(table, path, draw))


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Where every part of a decoded JSON value stands, from the innermost."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in rows:
        yield from ((key, *path) for path in _paths(inner))
    yield ()


def _replaced(value: Any, path: tuple[Any, ...], draw: st.DrawFn) -> Any:
    if not path:
        return draw(st.sampled_from(_others(value)))
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], draw)
    return copy


def _others(value: Any) -> list[Any]:
    """What may stand in place of a part of a record."""
    if isinstance(value, dict):
        some = [{k: v for k, v in value.items() if k != key} for key in value]
        names = ("c0", "x", "gpu", "rdma", "koordinator.sh/gpu-core")
        return [{}, *some, *({**value, name: inner} for name in names for inner in [*value.values(), "1"])]
    if isinstance(value, list):
        return [[], value[1:], [*value, 7], [*value, "0:0"], [*value, {"minor": 7, "resources": {}}], [*value, *value]]
    return [value + 1, value - 1, 0] if isinstance(value, int) else ["0", "1", "100", "1Gi", "0:0", f"{value}0"]


@every_dialect
def test_the_users_own_annotations_are_not_placement_annotations(case: Case) -> None:
    raw, _ = next(iter(case.malformed.values()))
    group = next(iter(case.equal.values()))
    for key in {**raw["metadata"]["annotations"], **group[0]["metadata"]["annotations"], "example.com/a": ""}:
        assert not of(case).owns_annotation(key)


@every_dialect
def test_its_vocabulary_is_known(case: Case) -> None:
    for group in case.equal.values():
        for raw in group:
            assert set(vocabularies(read_pod(raw))) == {case.name}
    for resource in of(case).resources(DEVICES, DEFAULT):
        assert vocabulary_of(resource.name) == case.name


@every_dialect
def test_what_a_node_offers_is_positive_for_every_card(case: Case) -> None:
    offered = of(case).resources(DEVICES, DEFAULT)
    assert offered
    for resource in offered:
        assert [index for index, _ in resource.amounts] == [c.index for c in DEVICES if c.type == resource.type]
        assert all(isinstance(amount, int) and amount > 0 for _, amount in resource.amounts)
    assert all(not resource.amounts for resource in of(case).resources((), DEFAULT))


@every_dialect
@given(data=st.data())
def test_property_a_container_sees_exactly_its_cards(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    request = read(case, raw)
    placement = placed(data, request)
    for name in (c.name for c in read_pod(raw).containers):
        if not dialects.device_requests(request, name):
            assert dialects.environment_of(read_pod(raw), request, name, (), NODE_CARDS) == {}
    for wanted in request.containers:
        own: list[Card] = [NODE_CARDS[i] for i in placement.cards(wanted.container)]
        seen = dialects.environment_of(read_pod(raw), request, wanted.container, own, NODE_CARDS)
        assert seen["NVIDIA_VISIBLE_DEVICES"] == ",".join(card.uuid for card in own)
        assert seen["MGPU_CARDS"] == ",".join(str(card.index) for card in own)
        assert float(seen["MGPU_CORE_PERCENT"]) == wanted.core / 10
        memory = own[0].memory * wanted.ratio // 100 if wanted.ratio else wanted.memory
        assert int(seen["MGPU_MEMORY_BYTES"]) == (own[0].memory if wanted.whole else memory)
        assert all(isinstance(value, str) for value in seen.values())


WISHES = {
    "mgpu.io/card-policy": "spread",
    "mgpu.io/card-models": "A100",
    "mgpu.io/exclude-card-models": "A100-PCIE",
    "mgpu.io/spread-group": "web",
}


@every_dialect_with_wishes
@given(data=st.data())
def test_property_wishes_stand_beside_any_ask(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    bare = read(case, raw)
    request = dialects.read_request(read_pod(with_annotations(raw, WISHES)), DEFAULT)
    assert request is not None
    assert replace(request, constraints=NO_CONSTRAINTS) == bare == dialects.read_request(read_pod(raw), DEFAULT)
    assert {f"mgpu.io/{key}": text for key, text in request.constraints.texts().items()} == WISHES
    assert (dialects.card_policy(request, DEFAULT), request.constraints.groups) == (
        "spread",
        (Group("spread-group", "default", "web"),),
    )
    assert dialects.card_policy(request, load_settings(flags={"cardPolicy": "binpack"})) == "spread"


@every_dialect_with_wishes
@given(data=st.data())
def test_property_a_bad_wish_is_a_bad_object_until_cards_are_decided(case: Case, data: st.DataObject) -> None:
    raw = with_annotations(data.draw(case.pods), {"mgpu.io/card-models": ",", "mgpu.io/spread-group": "web"})
    bound = {**raw, "spec": {**raw["spec"], "nodeName": "n1"}}
    for undecided in (raw, bound):
        with pytest.raises(BadObject) as error:
            dialects.read_request(read_pod(undecided), DEFAULT)
        assert [problem.field for problem in error.value.problems] == ["metadata.annotations[mgpu.io/card-models]"]
    bare = dialects.read_bare_request(read_pod(raw), DEFAULT)
    assert bare is not None
    record = of(case).write_placement(read_pod(raw), bare, placed(data, bare), DEVICES, DEFAULT, 0)
    request = dialects.read_request(read_pod(with_annotations(bound, record)), DEFAULT)
    assert request is not None
    assert str(request.constraints) == "spread-group web"


@every_dialect_with_wishes
@given(data=st.data())
def test_property_pods_with_several_cards_share_none_with_a_group(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    wished = read_pod(with_annotations(raw, {"mgpu.io/same-card-group": "pair"}))
    problems = dialects.constraint_problems(wished, read(case, raw))
    assert bool(problems) is any(c.cards > 1 for c in read(case, raw).containers)


@every_dialect
def test_wishes_are_no_placement_annotations(case: Case) -> None:
    assert not any(of(case).owns_annotation(key) for key in CONSTRAINT_ANNOTATIONS)


@every_dialect
def test_a_dialect_that_is_switched_off_reads_nothing(case: Case) -> None:
    off = load_settings(f"dialects: {{{case.name}: {{enabled: false}}}}")
    raw = next(iter(case.equal.values()))[0]
    assert dialects.read_request(read_pod(raw), off) is None
    assert of(case).resources(DEVICES, off) == ()
    assert dialects.read_request(read_pod(raw), DEFAULT) is not None


@pytest.mark.parametrize("resource", [CORE, "aliyun.com/gpu-mem", "koordinator.sh/gpu", "koordinator.sh/rdma"])
def test_zero_is_denied_and_holds_nothing_where_it_runs_already(resource: str) -> None:
    none = resources(None, {resource: "0"})
    with pytest.raises(BadObject):
        dialects.read_request(read_pod(pod("p", none)), DEFAULT)
    assert dialects.read_request(read_pod(pod("p", none, node="n1")), DEFAULT) is None
    beside = pod("p", none, {**resources(None, {"koordinator.sh/gpu": "50"}), "name": "d"}, node="n1")
    request = dialects.read_request(read_pod(beside), DEFAULT)
    assert request is not None
    assert [one.container for one in request.containers] == ["d"]
