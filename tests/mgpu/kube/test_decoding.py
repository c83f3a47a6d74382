"""What a user puts into an object hides no other object of the same list or watch, and changes none."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.kube.decoding import DEEPEST, decode, decode_list, decode_object

REAL_POD = Path(__file__).parents[3] / "bench/data/pod.json"


def nested(levels: int, inner: bytes = b"{}") -> bytes:
    return b'{"f:a":[' * levels + inner + b"]}" * levels


def depth_of(value: Any) -> int:
    depth = 0
    while value:
        value = value[0] if isinstance(value, list) else value["f:a"]
        depth += 1
    return depth


@pytest.mark.parametrize("levels", [DEEPEST // 2 + 1, 400])
def test_a_text_that_the_decoder_accepts_is_whole(levels: int) -> None:
    assert decode(nested(levels)) == orjson.loads(nested(levels))


@pytest.mark.parametrize("levels", [600, 5_000])
def test_what_is_nested_too_deeply_is_null_and_the_rest_is_there(levels: int) -> None:
    text = b'{"items":[{"a":' + nested(levels) + b',"b":"]}\\"\\\\"},{"c":[1]}],"d":' + nested(levels) + b',"e":2}'
    found = decode(text)
    assert (found["items"][0]["b"], found["items"][1], found["e"]) == (']}"\\', {"c": [1]}, 2)
    assert depth_of(found["items"][0]["a"]) <= DEEPEST
    assert depth_of(found["d"]) <= DEEPEST


def test_brackets_in_strings_do_not_count() -> None:
    text = b'{"a":"' + b"{[" * 300 + b'","b":' + nested(600) + b',"c":"' + b"]}\\\\\\" * 1 + b'"]}"}'
    found = decode(text)
    assert (found["a"], found["c"]) == ("{[" * 300, ']}\\"]}')


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    assert decode(b'{"a":"\xff","b":1}') == {"a": "\ufffd", "b": 1}


@pytest.mark.parametrize("text", [b"", b'{"a":', nested(600)[:-1], b"{" * 5000, b'"' + b'\\"' * 5000])
def test_a_text_that_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        decode(text)


NASTY = st.sampled_from(
    [
        "",
        "a",
        '},{"metadata":{',
        '"items":[{"metadata":{',
        ',"managedFields":[',
        ']},"spec":{',
        ']}"',
        "\\",
        "],",
        '],"kind":"',
        "[",
        "ü",
    ]
)
VALUES = st.recursive(
    NASTY | st.none() | st.integers(0, 3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NASTY | st.sampled_from(["metadata", "spec", "items"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    meta = {"name": draw(NASTY), "labels": draw(VALUES)}
    if draw(st.booleans()):
        meta["managedFields"] = draw(st.lists(VALUES, max_size=2))
        meta |= draw(st.sampled_from([{}, {"uid": "u"}]))
    kind = draw(st.sampled_from([{}, {"apiVersion": "v1", "kind": "Pod"}]))
    return {**kind, "metadata": meta, **draw(st.sampled_from([{}, {"spec": None}])), "status": draw(VALUES)}


def without_managed_fields(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "metadata": {key: value for key, value in item["metadata"].items() if key != "managedFields"}}


@given(
    st.lists(objects(), max_size=4),
    st.sampled_from(
        [("kind", "metadata", "items"), ("apiVersion", "items", "kind", "metadata"), ("items", "metadata")]
    ),
    st.sampled_from([b"", b"\n", b" "]),
)
def test_a_list_has_the_same_items_one_by_one(items: list[dict[str, Any]], fields: tuple[str, ...], end: bytes) -> None:
    whole = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": items}
    text = orjson.dumps({field: whole[field] for field in fields}) + end
    found, decoded = decode_list(text)
    assert found == {field: whole[field] for field in fields if field != "items"}
    assert list(map(without_managed_fields, decoded)) == list(map(without_managed_fields, items))


@given(objects())
def test_an_event_has_the_same_object(item: dict[str, Any]) -> None:
    event = decode_object(orjson.dumps({"type": "ADDED", "object": item}))
    assert (event["type"], without_managed_fields(event["object"])) == ("ADDED", without_managed_fields(item))


def test_managed_fields_are_left_out() -> None:
    """The fields are those that Kubernetes 1.36 wrote."""
    pod = orjson.loads(REAL_POD.read_bytes())
    assert pod["metadata"]["managedFields"]
    for text in (
        orjson.dumps({"kind": "PodList", "items": [pod, pod]}),
        orjson.dumps({"apiVersion": "v1", "items": [pod], "kind": "PodList", "metadata": {}}),
    ):
        for item in decode_list(text)[1]:
            assert item == without_managed_fields(pod)


def test_an_object_that_is_nested_too_deeply_hides_no_other_of_its_list() -> None:
    deep = b'{"metadata":{"name":"deep"},"a":' + nested(600) + b"}"
    _, items = decode_list(b'{"kind":"L","items":[{"metadata":{"name":"a"}},' + deep + b',{"metadata":{"name":"c"}}]}')
    assert [item["metadata"]["name"] for item in items] == ["a", "deep", "c"]


@pytest.mark.parametrize(
    "text",
    [b"", b'{"items":[{"metadata":{', b'{"items":[{"metadata":{}},]}', b'{"items":[{"metadata":{}},{"metadata":{]}'],
)
def test_a_list_that_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        list(decode_list(text)[1])
