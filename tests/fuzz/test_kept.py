"""Processes store little of a pod that is as large as an API server accepts.

The API server does not call the webhook for updates that change only labels, so the processes must do this themselves.
"""

import gc
import itertools
import string
import tracemalloc
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model import budget
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_node
from mgpu.model.record_seals import Keys, Signer
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.fuzz import hostile
from tests.fuzz.cost import LARGE

pytestmark = pytest.mark.fuzz
SETTINGS = load_settings()
_SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
RECORDS = RecordVerifier(Keys("2026-02-01T00:00:00Z", {_SIGNER.id: _SIGNER.key.public_key()}, _SIGNER))
_PODS = 2
_LARGER = 14
"""The limit, as a multiple of the memory for an ordinary pod, which takes about 2 KiB."""
_ATTEMPTS = 3
"""A table of the interpreter that grows during a measurement, or another thread, adds up to 100 KiB to one measurement.
What a process stores of each pod is in all of them, so the smallest measurement counts."""

Raw = dict[str, Any]
Take = Callable[[Raw], None]
_SIGNS = string.ascii_letters + string.digits


def labelled(i: int, size: int) -> Raw:
    """Short labels take the most memory for each byte that the API server stores."""
    raw = b.share(f"p{i}")
    names = itertools.islice(itertools.product(_SIGNS, repeat=4), size // 12)
    raw["metadata"]["labels"] = {"".join(name): "xy" for name in names}
    return raw


def with_long_labels(i: int, size: int) -> Raw:
    raw = b.share(f"p{i}")
    raw["metadata"]["labels"] = hostile.keyed(size, lambda j: (f"l{i}-{j}." + "a" * 180 + "/" + "b" * 60, "c" * 63))
    return raw


def with_128_labels(i: int, _: int) -> Raw:
    raw = b.share(f"p{i}")
    raw["metadata"]["labels"] = {f"l{i}-{j}." + "a" * 180 + "/" + "b" * 60: "c" * 63 for j in range(128)}
    return raw


def annotated(key: str, text: str) -> Callable[[int, int], Raw]:
    """Return a function that makes pods with a long value of this annotation, each with another value."""
    return lambda i, size: b.share(f"p{i}", annotations={key: (f"{i}{text}" * size)[:size]})


def recorded(i: int, size: int) -> Raw:
    key = "vke.volcengine.com/gpu-index-container-{}-{}"
    return b.share(f"p{i}", annotations=hostile.keyed(size, lambda j: (key.format(i, j), "0")))


def of_mtgpupods(i: int, size: int) -> Raw:
    return b.share(f"p{i}", annotations=hostile.keyed(size, lambda j: (f"lsalab.nthu/{i}-{j}", "")))


def showing_devices(i: int, size: int) -> Raw:
    raw = b.share(f"p{i}")
    raw["spec"]["containers"][0]["env"] = hostile.filled(size, lambda _: {"name": "NVIDIA_VISIBLE_DEVICES"})
    return raw


def asking_for_others(i: int, size: int) -> Raw:
    raw = b.share(f"p{i}")
    raw["spec"]["containers"][0]["resources"]["limits"] |= hostile.keyed(size, lambda j: (f"example.com/{i}-{j}", "1"))
    return raw


def with_statuses(i: int, size: int) -> Raw:
    raw = b.share(f"p{i}")
    rows = hostile.filled(size, lambda j: {"name": f"x{i}-{j}", "containerID": "x"})
    raw["status"] |= {"containerStatuses": rows, "conditions": rows}
    return raw


def with_owners(i: int, size: int) -> Raw:
    raw = b.share(f"p{i}")
    raw["metadata"] |= {
        "finalizers": hostile.filled(size, lambda j: f"a{i}-{j}/b"),
        "ownerReferences": hostile.filled(
            size, lambda j: {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": f"{j}"}
        ),
        "managedFields": hostile.filled(size, lambda j: {"manager": f"m{i}-{j}"}),
    }
    return raw


def with_scheduling(i: int, size: int) -> Raw:
    raw = b.share(f"p{i}")
    raw["spec"] |= {
        "tolerations": hostile.filled(size, lambda j: {"key": f"k{i}-{j}", "operator": "Exists"}),
        "nodeSelector": hostile.keyed(size, lambda j: (f"k{i}-{j}", "x")),
        "schedulingGates": hostile.filled(size, lambda j: {"name": f"g{i}-{j}"}),
        "resourceClaims": hostile.filled(size, lambda j: {"name": f"c{i}-{j}"}),
        "volumes": hostile.filled(size, lambda j: {"name": f"v{i}-{j}"}),
    }
    return raw


def with_long_texts(i: int, size: int) -> Raw:
    """Return a pod with long values in every field whose length an API server does not limit, and in others."""
    raw, text = b.share(f"p{i}"), f"x{i}" * (size // 2)
    raw["metadata"] |= {"generateName": text, "selfLink": text}
    keys = ("schedulerName", "priorityClassName", "serviceAccountName", "hostname", "subdomain", "runtimeClassName")
    raw["spec"] |= dict.fromkeys(keys, text)
    raw["spec"]["containers"][0] |= {"image": text, "command": [text], "workingDir": text}
    keys = ("nominatedNodeName", "startTime", "message", "reason", "hostIP", "podIP")
    raw["status"] |= dict.fromkeys(keys, text)
    return raw


def too_wide(i: int, size: int) -> Raw:
    return b.pod(f"p{i}", *hostile.filled(size, lambda j: hostile.asking(f"c{i}-{j}", b.CORE)))


PODS: Mapping[str, Callable[[int, int], Raw]] = {
    "short labels": labelled,
    "long labels": with_long_labels,
    "as many labels as are accepted": with_128_labels,
    "a long wish": annotated("mgpu.io/card-models", "x"),
    "a long list": annotated("vke.volcengine.com/container-multiple-gpu", ",1"),
    "a long record": annotated("scheduling.koordinator.sh/device-allocated", "x"),
    "a long seal": annotated("mgpu.io/seal", "x"),
    "a long GPUID": annotated("lsalab.nthu/GPUID", "x"),
    "a long mirror": annotated("kubernetes.io/config.mirror", "x"),
    "a wide record": recorded,
    "annotations of MtgpuPods": of_mtgpupods,
    "visible devices": showing_devices,
    "other resources": asking_for_others,
    "statuses": with_statuses,
    "owners and finalizers": with_owners,
    "scheduling": with_scheduling,
    "long texts": with_long_texts,
    "more containers than are accepted": too_wide,
}


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Freeze the objects of earlier tests, because each measurement collects garbage."""
    gc.collect()
    gc.freeze()


def of_scheduler() -> Take:
    return ClusterCache(SETTINGS, records=RECORDS).pod_changed


def of_agent() -> Take:
    return NodePods(SETTINGS, lambda: None, RECORDS).take


def exceeds(process: Callable[[], Take], raws: list[Raw], limit: float) -> str:
    """Return how much the process stores for one of these pods if that is more than `limit` bytes, or ""."""
    found = 0.0
    for _ in range(_ATTEMPTS):
        found = kept_by(process, raws)
        if found < limit:
            return ""
    return f"{found / 1024:.1f} KiB, more than {limit / 1024:.1f}"


def kept_by(process: Callable[[], Take], raws: list[Raw]) -> float:
    """Return the bytes that the process stores for one of these pods, without what it stores once."""

    def allocated_after(take: Take, texts: list[bytes]) -> int:
        for text in texts:
            take(orjson.loads(text))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    texts = [orjson.dumps(raw) for raw in raws]
    half = len(texts) // 2
    allocated_after(process(), texts)  # fills the caches, which have a fixed size
    take = process()
    tracemalloc.start()
    try:
        before = allocated_after(take, texts[:half])
        return (allocated_after(take, texts[half:]) - before) / (len(texts) - half)
    finally:
        tracemalloc.stop()


@cache
def kept_of_ordinary(process: Callable[[], Take], node: str) -> float:
    """Return the same for small pods, each of a workload of its own."""
    pods = [b.share(f"p{i}", mib=1024 + i, node=node) for i in range(_PODS)]
    return min(kept_by(process, pods) for _ in range(_ATTEMPTS))


@pytest.mark.parametrize(
    ("process", "node"), [(of_scheduler, "n1"), (of_scheduler, ""), (of_agent, "n1")], ids=["bound", "unbound", "agent"]
)
@pytest.mark.parametrize("name", PODS)
def test_process_keeps_of_the_largest_pod_little_more_than_of_an_ordinary_one(
    process: Callable[[], Take], node: str, name: str
) -> None:
    large = [PODS[name](i, LARGE) for i in range(_PODS)]
    for raw in large:
        raw["spec"]["nodeName"] = node
    assert not exceeds(process, large, _LARGER * kept_of_ordinary(process, node))


@pytest.mark.parametrize("core", [1, 101], ids=["right", "wrong"])
@pytest.mark.parametrize(("process", "most"), [(of_scheduler, 32), (of_agent, 4)], ids=["scheduler", "agent"])
def test_process_keeps_little_of_an_ended_pod_with_as_many_containers_as_are_accepted(
    process: Callable[[], Take], most: int, core: int
) -> None:
    """Failed pods stay until they are deleted, and their number is not limited."""
    wide = [
        b.pod(
            f"p{i}",
            *(b.container(f"c{i}-{j}", core, 256) for j in range(budget.MAX_CONTAINERS)),
            node="n1",
            phase="Failed",
        )
        for i in range(_PODS)
    ]
    assert not exceeds(process, wide, most * kept_of_ordinary(process, "n1"))


@pytest.mark.parametrize("path", ["metadata.labels", "metadata.annotations", "status.capacity"])
def test_node_with_more_entries_than_any_has_is_refused(path: str) -> None:
    raw = b.node("n1")
    part, key = path.split(".")
    raw[part][key] |= {f"mgpu.io/{i}": "1" for i in range(2000)}
    with pytest.raises(BadObject, match="entries, more than the 1024 that mgpu stores"):
        read_node(raw)
