"""What is kept of MtgpuPods says the same of them, and is small."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mgpu.dialects.mtgpu import MtgpuPod, read_mtgpupod
from mgpu.model.errors import BadObject
from scheduler.mtgpu.kept import of_mtgpupod, of_own_pod, read_text, text_of
from scheduler.mtgpu.known import Known
from scheduler.mtgpu.pods import read_made
from scheduler.mtgpu.status import next_status
from scheduler.mtgpu.verdict import FALSE, Said, Verdict
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
def test_property_kept_mtgpupod_reads_as_the_whole_one(
    containers: Any, said: dict[str, Any], status: dict[str, Any], *, deleting: bool
) -> None:
    raw = b.mtgpupod("m")
    raw["spec"] |= {"containers": containers, "volumes": [{"name": "v"}]}
    raw["metadata"]["annotations"] |= said
    raw["status"] = status
    if deleting:
        raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert read(read_text(text_of(of_mtgpupod(raw)))) == read(raw)


def own_pod() -> dict[str, Any]:
    raw = b.pod("m", b.container(), annotations=b.mtgpupod("m")["metadata"]["annotations"], node="n1")
    raw["metadata"]["ownerReferences"] = [b.owned("m")]
    return raw


def test_kept_pod_reads_as_the_whole_one_and_is_mirrored_alike() -> None:
    item, own = b.mtgpupod("m"), own_pod()
    own["spec"]["containers"][0]["env"] = [{"name": "A"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}]
    own["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    kept, verdict = read_text(text_of(of_own_pod(own))), Verdict(Said(FALSE, "Bound", ""))
    assert read_made(kept) == read_made(own)
    assert next_status(item, verdict, kept, "now") == next_status(item, verdict, own, "now")


def test_pod_with_large_annotations_is_mirrored_without_them() -> None:
    own = own_pod()
    own["metadata"]["annotations"] |= {"note": "x" * 20_000}
    assert of_own_pod(own)["metadata"]["annotations"] == b.mtgpupod("m")["metadata"]["annotations"]


def hostile(name: str, size: int) -> dict[str, Any]:
    raw = b.mtgpupod(name)
    env = filled(size // 3, lambda i: {"name": f"V{i}"})
    raw["spec"]["containers"] = [{"name": "c", "env": env}]
    raw["spec"]["volumes"] = filled(size // 3, lambda i: {"name": f"v{i}"})
    raw["metadata"]["annotations"] |= keyed(size // 3, lambda i: (f"a{i}", ""))
    return raw


def memory(raws: Sequence[dict[str, Any]]) -> int:
    """What the scheduler keeps of these."""
    known = Known()
    tracemalloc.start()
    try:
        for raw in raws:
            known.mtgpupod_changed(raw)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_large_mtgpupods_take_as_little_of_the_schedulers_memory_as_ordinary_ones() -> None:
    ordinary = [b.mtgpupod(f"m{i}") for i in range(20)]
    memory(ordinary)  # what is made once
    assert memory([hostile(f"m{i}", 150_000) for i in range(20)]) < 1.5 * memory(ordinary)
