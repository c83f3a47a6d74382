"""`decode`: what a user puts into an object hides no other object of the same list or watch."""

from typing import Any

import orjson
import pytest

from mgpu.kube.decoding import DEEPEST, decode


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
