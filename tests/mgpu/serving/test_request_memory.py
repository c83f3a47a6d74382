"""Limits of the memory that requests use together."""

import io
import threading
import time
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.errors import RetryLater
from mgpu.serving.request_memory import EXTENDER, MIB, ORDINARY, Limits, RequestMemory, TooLarge, estimate_decoded_size
from tests.arbitrary import JSON
from tests.examples import examples

LIMITS = Limits(body=4 * MIB, bodies=5 * MIB, ordinary=ORDINARY, large=20 * MIB)
LARGE = b'"' + b"x" * (3 * MIB) + b'"'
SHAPES = {
    "empty objects": b"[" + b"{}," * 50_000 + b"0]",
    "empty lists": b"[" + b"[]," * 50_000 + b"0]",
    "objects of one key": b"[" + b'{"":1},' * 50_000 + b"0]",
    "objects in objects": b"[" + b'{"a":{"b":{"c":{}}}},' * 20_000 + b"0]",
    "objects of eleven keys": orjson.dumps([{chr(97 + i): 0 for i in range(11)}] * 20_000),
    "lists of one number": b"[" + b"[0]," * 50_000 + b"0]",
    "numbers": b"[" + b"1000000," * 50_000 + b"0]",
    "short texts": b"[" + b'"ab",' * 50_000 + b"0]",
    "short texts of other letters": ("[" + '"é",' * 50_000 + "0]").encode(),
    "a text with one wide letter": ('"' + "a" * 500_000 + '\U0001f600"').encode(),
    "a text with one wide letter, escaped": b'"' + b"a" * 500_000 + b'\\ud83d\\ude00"',
    "a text with escapes of Go": b'"' + b"a \\u0026\\u0026 b \\u003e c;" * 20_000 + b'"',
    "an escape of Go before a wide letter": b'"' + b"a" * 500_000 + b'\\\\u0026\\ud83d\\ude00"',
    "keys": orjson.dumps({f"{i:070}": "x" for i in range(20_000)}),
    "texts full of quotes": orjson.dumps(['"' * 100_000] * 5),
}


def size_of(body: bytes) -> int:
    """Return the memory of the decoded body, as tracemalloc counts it."""
    tracemalloc.start()
    try:
        held = orjson.loads(body)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del held
    return size


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
def test_decoded_body_is_not_larger_than_estimated(body: bytes) -> None:
    assert size_of(body) <= estimate_decoded_size(body) + 1024


def node(i: int) -> dict[str, Any]:
    """Return a Node of the largest usual size: a kubelet reports at most 50 images."""
    names = [f"registry.example/team/image-{j}@sha256:{'ab' * 32}" for j in range(50)]
    images = [{"names": [name, f"registry.example/team/image-{j}:v1"], "sizeBytes": j} for j, name in enumerate(names)]
    labels = {f"feature.node.kubernetes.io/cpu-cpuid.FEATURE{j}": "true" for j in range(60)}
    annotations = {"example.com/script": "a && b"} if i == 0 else {}
    managed: dict[str, Any] = {"f:metadata": {"f:labels": {f"f:{name}": {} for name in labels}}}
    meta = {"name": f"n{i}", "labels": labels, "annotations": annotations, "managedFields": [{"fieldsV1": managed}]}
    return {"metadata": meta, "status": {"images": images}}


def test_nodes_of_a_large_cluster_fit_into_a_call_of_the_extender() -> None:
    """With `nodeCacheCapable: false`. kube-scheduler does not split a call that is too large."""
    few = orjson.dumps({"Nodes": {"items": [node(i) for i in range(50)]}}).replace(b"&", b"\\u0026")
    assert 19_000 > len(few) / 50 > 14_000
    assert 100 * estimate_decoded_size(few) < EXTENDER.large


@given(st.lists(JSON, min_size=1, max_size=5))
@examples(16)
def test_property_decoded_body_is_not_larger_than_estimated(parts: list[Any]) -> None:
    body = orjson.dumps(parts * 50, option=orjson.OPT_NON_STR_KEYS)
    assert size_of(body) <= estimate_decoded_size(body) + 1024


def test_body_above_the_limit_is_not_read_further() -> None:
    stream = io.BytesIO(b"x" * (3 * LIMITS.body))
    with pytest.raises(TooLarge), RequestMemory(LIMITS).read(stream):
        pass
    assert stream.tell() <= LIMITS.body + (64 << 10)


def test_body_above_the_decoded_limit_is_too_large() -> None:
    with (
        pytest.raises(TooLarge, match="when it is decoded"),
        RequestMemory(LIMITS).read(io.BytesIO(b"[" + b"{}," * 300_000 + b"0]")),
    ):
        pass


def test_second_body_is_busy_until_the_first_is_released() -> None:
    there = RequestMemory(LIMITS)
    with there.read(io.BytesIO(LARGE)), pytest.raises(RetryLater), there.read(io.BytesIO(LARGE)):
        pass
    with there.read(io.BytesIO(LARGE)) as body:
        assert bytes(body) == LARGE


def test_ordinary_request_is_read_while_large_requests_use_their_limit() -> None:
    there = RequestMemory(Limits(body=4 * MIB, bodies=3 * MIB, ordinary=ORDINARY, large=7 * MIB))
    with there.read(io.BytesIO(LARGE)), there.read(io.BytesIO(b"{}")) as body:
        assert bytes(body) == b"{}"


def test_request_waits_until_memory_is_free() -> None:
    there, held, done = RequestMemory(LIMITS), threading.Event(), threading.Event()
    heavy = b"[" + b"{}," * 160_000 + b"0]"  # 18 of 20 MiB

    def hold() -> None:
        with there.read(io.BytesIO(heavy)):
            held.set()
            time.sleep(0.1)
            done.set()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(5)
    with there.read(io.BytesIO(heavy)):
        assert done.is_set()
    thread.join()


def test_failed_request_releases_its_memory() -> None:
    there = RequestMemory(LIMITS)
    for _ in range(20):
        with pytest.raises(ZeroDivisionError), there.read(io.BytesIO(LARGE)):
            raise ZeroDivisionError
