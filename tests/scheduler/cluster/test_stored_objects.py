"""The stored parts of MtgpuPods are read like the whole objects, and are small."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mgpu.dialects.mtgpu import FINALIZER, MtgpuPod, read_mtgpupod
from mgpu.model.errors import BadObject
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Publisher
from scheduler.cluster.mtgpupod_objects import MtgpuPodObjects
from scheduler.cluster.stored_objects import FINALIZERS, decode, encode, stored_mtgpupod, stored_own_pod
from scheduler.cluster.taints import untolerated_taint
from scheduler.mtgpupods.mtgpupod_status import FALSE, Condition, DesiredMtgpuPod, next_status
from scheduler.mtgpupods.observation import observe, read_stored
from scheduler.mtgpupods.observed_node import UnreadableMtgpuPod, is_interrupted, read_owned_pod
from tests import builders as b
from tests.arbitrary import JSON
from tests.fuzz.hostile import filled, keyed

CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b"]) | JSON},
        optional={
            "env": st.just([{"name": "A", "value": "b"}, {"name": "NVIDIA_VISIBLE_DEVICES"}]) | JSON,
            "resources": st.just({"limits": {"cpu": "1", "nvidia.com/gpu": "1"}, "requests": {"cpu": True}}) | JSON,
            "image": JSON,
        },
    )
    | JSON,
    max_size=3,
)
_KEYS = st.sampled_from(["lsalab.nthu/gpu_mem", "mgpu.io/card-policy", "team"])
SAID = st.dictionaries(_KEYS, st.text(max_size=3) | JSON)
STATUS = st.fixed_dictionaries({}, optional={"phase": st.just("Failed"), "BoundDeviceID": st.just("GPU-1")})


def read(raw: dict[str, Any]) -> MtgpuPod | tuple[Any, ...]:
    try:
        return read_mtgpupod(raw)
    except BadObject as error:
        return error.problems


@given(containers=CONTAINERS | JSON, said=SAID, status=STATUS, deleting=st.booleans())
def test_property_stored_mtgpupod_is_read_like_the_whole_one(
    containers: Any, said: dict[str, Any], status: dict[str, Any], *, deleting: bool
) -> None:
    raw = b.mtgpupod("m")
    raw["spec"] |= {"containers": containers, "volumes": [{"name": "v"}]}
    raw["metadata"]["annotations"] |= said
    raw["status"] = status
    if deleting:
        raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    raw = decode(encode(raw))  # as it arrives: JSON has no infinity
    assert read(decode(encode(stored_mtgpupod(raw)))) == read(raw)


def own_pod() -> dict[str, Any]:
    raw = b.pod("m", b.container(), annotations=b.mtgpupod("m")["metadata"]["annotations"], node="n1")
    raw["metadata"]["ownerReferences"] = [b.owned("m")]
    return raw


def test_stored_pod_is_read_and_mirrored_like_the_whole_one() -> None:
    item, own = b.mtgpupod("m"), own_pod()
    own["spec"]["containers"][0]["env"] = [{"name": "A"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}]
    own["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    kept, verdict = decode(encode(stored_own_pod(own))), DesiredMtgpuPod(Condition(FALSE, "Bound", ""))
    assert read_owned_pod(kept) == read_owned_pod(own)
    assert next_status(item, verdict, kept, "now") == next_status(item, verdict, own, "now")


def test_stored_pod_leaves_out_large_annotations() -> None:
    own = own_pod()
    own["metadata"]["annotations"] |= {"note": "x" * 20_000}
    assert stored_own_pod(own)["metadata"]["annotations"] == b.mtgpupod("m")["metadata"]["annotations"]


def test_stored_pod_leaves_out_the_largest_fields_of_large_metadata() -> None:
    own = own_pod()
    owner = own["metadata"]["ownerReferences"][0]
    own["metadata"] |= {
        "labels": keyed(1_000_000, lambda i: (f"a{i}", "")),
        "finalizers": filled(100_000, lambda i: f"a/{i}"),
        "ownerReferences": [*filled(100_000, lambda i: {"kind": "X", "name": "x", "uid": f"{i}"}), owner],
    }
    own["metadata"]["annotations"] |= {"note": "x" * 15_000}
    found = stored_own_pod(own)["metadata"]
    assert len(encode(found)) <= 16 << 10
    assert found["ownerReferences"] == [owner]
    assert found["annotations"].items() >= b.mtgpupod("m")["metadata"]["annotations"].items()
    assert {"labels", "finalizers"}.isdisjoint(found)


def test_stored_pod_leaves_out_the_largest_fields_of_a_large_status() -> None:
    own = own_pod()
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    rows = filled(100_000, lambda i: {"type": f"x{i}", "status": "True", "message": "y" * 1000})
    own["status"] |= {
        "phase": "Failed",
        "hostIP": "10.0.0.1",
        "conditions": [*rows, disrupted],
        "containerStatuses": filled(100_000, lambda i: {"name": f"c{i}"}),
    }
    found = stored_own_pod(own)
    assert len(encode(found["status"])) <= 16 << 10
    assert (found["status"]["phase"], found["status"]["hostIP"]) == ("Failed", "10.0.0.1")
    assert is_interrupted(found)


def test_stored_mtgpupod_reduces_a_large_status_which_is_written_again() -> None:
    item, verdict = b.mtgpupod("m", bound="GPU-1", phase="Running"), DesiredMtgpuPod(Condition(FALSE, "Bound", ""))
    item["status"] |= {"PodObjectMeta": {"uid": "u", "labels": keyed(1_000_000, lambda i: (f"a{i}", ""))}}
    kept = stored_mtgpupod(item)
    assert len(encode(kept)) < 2_000
    assert read(kept) == read(item)
    assert next_status(kept, verdict, stored_own_pod(own_pod()), "now") != kept["status"]


def test_stored_mtgpupod_with_a_large_spec_is_unreadable_until_it_is_bound() -> None:
    item = b.mtgpupod("m")
    item["spec"]["containers"][0]["name"] = "x" * 1_000_000
    found = read_stored(stored_mtgpupod(item))
    assert isinstance(found, UnreadableMtgpuPod)
    assert "the part that mgpu reads (containers and tolerations) has 10" in found.problems
    item["status"]["BoundDeviceID"] = "GPU-1"
    assert isinstance(read_stored(stored_mtgpupod(item)), MtgpuPod)
    assert len(encode(stored_mtgpupod(item))) < 2_000


def test_stored_tolerations_have_only_the_fields_that_are_read() -> None:
    right = {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute"}
    odd = [{}, {"operator": "Exists", "x": [{}] * 1000, "effect": "NoSchedule"}, {"key": {"a": 1}}, 1]
    item = b.mtgpupod("m")
    item["spec"]["tolerations"] = [{**right, "x": [{}] * 1000}, *odd, *[{"key": "z"}] * 1000]
    assert stored_mtgpupod(item)["spec"]["tolerations"] == [right, {"key": "z"}, {}]


TOLERATIONS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "key": st.sampled_from(["a", "b", "", None]),
            "operator": st.sampled_from(["Equal", "Exists", "", None, "Lt"]),
            "value": st.sampled_from(["x", "", None]),
            "effect": st.sampled_from(["NoExecute", "NoSchedule", "", None]),
        },
    ),
    max_size=3,
)


@given(tolerations=TOLERATIONS, key=st.sampled_from("ab"), value=st.sampled_from(["x", "y", None]))
def test_property_stored_tolerations_match_the_same_taints(
    tolerations: list[dict[str, Any]], key: str, value: str | None
) -> None:
    item, taint = b.mtgpupod("m"), {"key": key, "value": value, "effect": "NoExecute"}
    item["spec"]["tolerations"] = tolerations
    assert untolerated_taint(stored_mtgpupod(item)["spec"], [taint]) == untolerated_taint(item["spec"], [taint])


@given(JSON)
def test_property_tolerations_of_any_type_can_be_stored(tolerations: Any) -> None:
    item = b.mtgpupod("m")
    item["spec"]["tolerations"] = tolerations
    untolerated_taint(stored_mtgpupod(item)["spec"], [{"key": "a", "effect": "NoExecute"}])


def test_stored_finalizers_are_limited_and_include_mgpus_own() -> None:
    item = b.mtgpupod("m")
    item["metadata"]["finalizers"] = [*filled(1_000_000, lambda i: f"a/{i}"), FINALIZER]
    found = stored_mtgpupod(item)["metadata"]["finalizers"]
    assert len(found) == FINALIZERS + 1
    assert FINALIZER in found
    item["metadata"]["finalizers"].remove(FINALIZER)
    found = stored_mtgpupod(item)["metadata"]["finalizers"]
    assert len(found) == FINALIZERS + 1
    assert FINALIZER not in found


def nested(name: str) -> dict[str, Any]:
    """As large as admission lets it be, of what takes the most memory for its size."""
    raw = b.mtgpupod(name)
    raw["spec"]["tolerations"] = [{"operator": "Exists", "x": [{}] * 60_000}]
    return raw


def test_observation_takes_no_more_memory_for_large_mtgpupods() -> None:
    def peak(raws: Sequence[dict[str, Any]]) -> int:
        state = ClusterCache(load_settings(""))
        for raw in raws:
            state.mtgpupods.mtgpupod_changed(raw)
        tracemalloc.start()
        try:
            observe(state, "n1", enabled=True)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    ordinary = [b.mtgpupod(f"m{i}") for i in range(10)]
    peak(ordinary)  # what is made once
    assert peak([nested(f"m{i}") for i in range(10)]) < 1.5 * peak(ordinary)


def hostile(name: str, size: int) -> dict[str, Any]:
    raw = b.mtgpupod(name)
    env = filled(size // 3, lambda i: {"name": f"V{i}"})
    raw["spec"]["containers"] = [{"name": "c", "env": env}]
    raw["spec"]["volumes"] = filled(size // 3, lambda i: {"name": f"v{i}"})
    raw["metadata"]["annotations"] |= keyed(size // 3, lambda i: (f"a{i}", ""))
    return raw


def memory(raws: Sequence[dict[str, Any]]) -> int:
    """What the scheduler keeps of these."""
    known = MtgpuPodObjects(Publisher())
    tracemalloc.start()
    try:
        for raw in raws:
            known.mtgpupod_changed(raw)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_large_mtgpupods_take_no_more_memory_than_ordinary_ones() -> None:
    ordinary = [b.mtgpupod(f"m{i}") for i in range(20)]
    memory(ordinary)  # what is made once
    assert memory([hostile(f"m{i}", 150_000) for i in range(20)]) < 1.5 * memory(ordinary)
