"""The scheduler's endpoints and events cost little more for hostile pods than for an ordinary pod of the same size."""

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import Client

from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import BadObject
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.examples import examples
from tests.fuzz import hostile
from tests.fuzz.cost import LARGE, Cost, cost, in_proportion, takes_at_most
from tests.scheduler.fake import doors, review

pytestmark = pytest.mark.fuzz
_TIME, _MEMORY = 15, 6
"""Times an ordinary pod's or Binding's, which has six times fewer containers in as many bytes."""


@pytest.fixture(scope="module")
def both() -> tuple[Client, Client]:
    return doors()


@pytest.fixture(scope="module")
def ordinary(both: tuple[Client, Client]) -> Callable[[Any], Cost]:
    """What an ordinary pod of the size of another costs the extender."""
    of_size = cache(lambda size: cost(call_of(both[1], "/filter", asked(hostile.ordinary(size)))))
    return lambda raw: of_size(-(-len(orjson.dumps(raw)) // LARGE) * LARGE)


def call_of(client: Client, path: str, tree: Any) -> Callable[[], object]:
    body = orjson.dumps(tree)

    def call() -> None:
        reply = client.post(path, data=body, content_type="application/json")
        assert reply.status_code in (200, 400), reply.text
        assert len(reply.data) < 3 * len(body)

    return call


def asked(raw: Any) -> dict[str, Any]:
    return {"Pod": raw, "NodeNames": ["n1"]}


@pytest.mark.parametrize("name", hostile.PODS)
def test_hostile_pod_costs_the_extender_little_more_than_an_ordinary_one_of_its_size(
    both: tuple[Client, Client], ordinary: Callable[[Any], Cost], name: str
) -> None:
    raw = hostile.PODS[name](LARGE)
    in_proportion(call_of(both[1], "/filter", asked(raw)), ordinary(raw), _TIME, _MEMORY)


BINDINGS: dict[str, dict[str, Any]] = {
    "other annotations": {"annotations": hostile.keyed(LARGE, lambda i: (f"a{i}", ""))},
    "placement annotations": {"annotations": hostile.keyed(LARGE, lambda i: (f"mgpu.io/slices-given{i}", ""))},
    "cards of containers": {
        "annotations": hostile.keyed(LARGE, lambda i: (f"vke.volcengine.com/gpu-index-container-{i}", "0"))
    },
    "labels": {"labels": hostile.keyed(LARGE, lambda i: (f"a{i}", ""))},
    "empty objects": {"managedFields": [{}] * (LARGE // 3)},
}


@pytest.mark.parametrize("name", BINDINGS)
def test_hostile_binding_costs_little_more_than_one_with_a_long_note(both: tuple[Client, Client], name: str) -> None:
    def binding(meta: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": "p", **meta}, "target": {"kind": "Node", "name": "n1"}}

    managed = hostile.filled(LARGE, lambda i: {"manager": f"m{i}", "fieldsV1": {"f:metadata": {"f:name": {}}}})
    plain = cost(call_of(both[0], "/bind-admission", review(binding({"managedFields": managed}), name="p")))
    found = call_of(both[0], "/bind-admission", review(binding(BINDINGS[name]), name="p"))
    in_proportion(found, plain, _TIME, _MEMORY)


@given(names=st.lists(st.sampled_from(sorted(hostile.PODS)), min_size=2, max_size=4, unique=True))
@examples(3)
def test_property_mixture_of_hostile_pods_costs_the_extender_little_more_than_an_ordinary_one(
    both: tuple[Client, Client], ordinary: Callable[[Any], Cost], names: list[str]
) -> None:
    mixture = hostile.mixed(*(hostile.PODS[name](LARGE // len(names)) for name in names))
    in_proportion(call_of(both[1], "/filter", asked(mixture)), ordinary(mixture), _TIME, _MEMORY)


def memory(raws: list[dict[str, Any]], before: Sequence[dict[str, Any]] = ()) -> int:
    """Return the bytes that the scheduler keeps of these pods. before: pods that fill the caches of fixed sizes."""
    tracemalloc.start()
    try:
        kept_of(before)
        gc.collect()
        at_first = tracemalloc.get_traced_memory()[0]
        state = kept_of(raws)
        gc.collect()  # what nobody keeps does not count
        found = tracemalloc.get_traced_memory()[0] - at_first
        del state
        return found
    finally:
        tracemalloc.stop()


def kept_of(raws: Sequence[dict[str, Any]]) -> ClusterCache:
    state = ClusterCache(load_settings())
    for raw in raws:
        state.pod_changed(raw)
    return state


def large(name: str, key: str) -> dict[str, Any]:
    raw = b.share(name, annotations=hostile.keyed(LARGE, lambda i: (f"{key}{i}", "x")))
    raw["spec"]["containers"][0]["env"] = hostile.filled(LARGE, lambda i: {"name": f"V{i}"})
    return raw


def test_gpu_pod_with_large_annotations_and_environment_takes_as_little_memory_as_an_ordinary_one() -> None:
    ordinary = [b.share(f"p{i}") for i in range(50)]
    memory(ordinary)  # what is made once
    found = memory([large(f"p{i}", f"a{i}-") for i in range(50)], before=[large("p", key) for key in "bcd"])
    assert found < 1.5 * memory(ordinary)


def test_pod_that_exceeds_the_budget_is_kept_with_few_problems() -> None:
    ordinary = [b.share(f"p{i}") for i in range(20)]
    wrong = hostile.filled(LARGE, lambda i: hostile.asking(f"c{i}", b.CORE, "x"))
    memory(ordinary)
    assert memory([b.pod(f"p{i}", *wrong) for i in range(20)]) < 3 * memory(ordinary)


Take = Callable[[dict[str, Any]], None]


def of_scheduler() -> Take:
    return ClusterCache(load_settings()).pod_changed


def of_agent() -> Take:
    return NodePods(load_settings(), lambda: None).take


_EVENT = 15
"""Times the decoding of an ordinary pod of the size. At b68f911 one of 256 containers with slices took 60 times."""


@cache
def decoding(size: int) -> Cost:
    text = orjson.dumps(hostile.ordinary(size))
    return cost(lambda: orjson.loads(text))


@pytest.mark.parametrize(
    ("process", "node"), [(of_scheduler, "n1"), (of_scheduler, ""), (of_agent, "n1")], ids=["bound", "unbound", "agent"]
)
@pytest.mark.parametrize("name", [name for name in hostile.PODS if not name.startswith("numbers")])
def test_event_of_changed_labels_costs_little_more_than_the_decoding_of_a_pod(
    process: Callable[[], Take], node: str, name: str
) -> None:
    """A user that may change pods can do so hundreds of times a second, and one thread handles all events."""
    raw, take = hostile.PODS[name](LARGE), process()
    raw["spec"]["nodeName"] = node
    labels = raw["metadata"].setdefault("labels", {})

    def relabelled() -> None:
        labels["n"] = str(int(labels.get("n", "0")) + 1)
        raw["metadata"]["resourceVersion"] = labels["n"]
        with suppress(BadObject):  # containers of one name, which an API server refuses
            take(raw)

    relabelled()
    size = -(-len(orjson.dumps(raw)) // LARGE) * LARGE
    takes_at_most(relabelled, _EVENT * decoding(size).seconds)
