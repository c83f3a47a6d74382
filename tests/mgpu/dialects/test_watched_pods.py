"""A pod that is read again only where something of it has changed is the one that would have been read."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.dialects.watched_pods import fingerprint, limit_containers
from mgpu.model import budget
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_pod
from mgpu.model.record_seals import SEAL, Keys, Signer, Subject
from mgpu.model.resizing import RESIZE, Applied, Size, Sizes, write_applied, write_sizes
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from tests import builders as b

Raw = dict[str, Any]
Path = tuple[str | int, ...]

SETTINGS = load_settings("dialects: {mtgpu: {enabled: true}}")
_SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
RECORDS = RecordVerifier(Keys("2026-02-01T00:00:00Z", {_SIGNER.id: _SIGNER.key.public_key()}, _SIGNER))
INDEX = "vke.volcengine.com/gpu-index-container-c"


def waiting() -> Raw:
    """A pod with something in every field that is read."""
    raw = b.share("p", annotations={"mgpu.io/card-models": "A100", "mgpu.io/spread-group": "g", "other": "x"})
    raw["metadata"]["annotations"][RESIZE] = "c=512Mi"
    raw["metadata"] |= {"labels": {"a": "b"}, "resourceVersion": "1", "creationTimestamp": "2026-03-01T00:00:00Z"}
    raw["spec"] |= {
        "schedulingGates": [{"name": "x/y"}],
        "schedulerName": "default-scheduler",
        "priority": 5,
        "overhead": {"cpu": "1"},
        "resources": {"requests": {"cpu": "9"}},
        "initContainers": [{**b.container("i", 20, 512), "restartPolicy": "Always"}],
        "terminationGracePeriodSeconds": 40,
    }
    raw["status"] |= {"nominatedNodeName": "n2", "startTime": "2026-03-01T00:00:01Z"}
    return raw


def running() -> Raw:
    raw = waiting()
    del raw["spec"]["schedulingGates"]
    raw["spec"]["nodeName"] = "n1"
    rows = [{"name": "c", "containerID": "x", "state": {"running": {}}}]
    raw["status"] |= {"phase": "Running", "containerStatuses": rows}
    raw["status"]["initContainerStatuses"] = [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]
    record = {"vke.volcengine.com/assumed": "true", INDEX: "0", "vke.volcengine.com/gpu-index-container-i": "0"}
    record |= write_sizes(Sizes(2, {"c": Size(512 << 20, 768 << 20)}))
    sealed = RECORDS.sealed(Subject("uid-p", "default", "p", "n1"), record)
    raw["metadata"]["annotations"] |= {**sealed, **write_applied(Applied(1, frozenset("c")))}
    return raw


def posing() -> Raw:
    """A pod for a share that names an MtgpuPod as its owner."""
    raw = running()
    raw["metadata"]["ownerReferences"] = [b.owned()]
    said = b.mtgpupod()["metadata"]["annotations"]
    raw["metadata"]["annotations"] |= {**said, "lsalab.nthu/more": "x"}
    raw["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-n1-0"}]
    return raw


def claimed() -> Raw:
    raw = waiting()
    rows = [{"containerName": "i", "resourceName": b.CORE, "requestName": "r"}]
    raw["status"]["extendedResourceClaimStatus"] = {"requestMappings": rows}
    return raw


def occupying() -> Raw:
    raw = b.occupy_pod(card=0)
    raw["metadata"]["deletionTimestamp"] = "2026-03-01T00:00:00Z"
    raw["metadata"]["deletionGracePeriodSeconds"] = 90
    return raw


PODS = {made.__name__: made for made in (waiting, running, posing, claimed, occupying)}


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a pod, but for its name and the names in its status, which no update changes."""
    if path in [("metadata", key) for key in ("uid", "namespace", "name")] or (path[:1], path[-1:]) == (
        ("status",),
        ("name",),
    ):
        return
    if path not in ((), ("metadata",)):
        yield path
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in rows:
        yield from leaves(below, (*path, key))


def changed(raw: Raw, path: Path) -> Iterator[Raw]:
    """The pod without what is at this place, and with something else there."""
    for other in (None, *_others(raw, path)):
        new = copy.deepcopy(raw)
        at: Any = new
        for key in path[:-1]:
            at = at[key]
        if other is None:
            del at[path[-1]]
        else:
            at[path[-1]] = other
        new["metadata"]["resourceVersion"] = "2"
        yield new


def _others(raw: Raw, path: Path) -> Iterator[Any]:
    at: Any = raw
    for key in path:
        at = at[key]
    if isinstance(at, str):
        yield from (at + "1", "2")
    elif isinstance(at, int):
        yield at + 1


def as_scheduler(*raws: Raw) -> GpuPod | str | None:
    """What a scheduler knows of a pod after these events."""
    state = ClusterCache(SETTINGS, records=RECORDS)
    state.node_changed(b.node())
    try:
        for raw in raws:
            state.pod_changed(raw)
    except BadObject as error:
        return repr(error)
    return state.gpu_pod("uid-p") or state.gpu_pod("uid-mtgpupod-occupypod-n1-zxcvb")


def as_agent(*raws: Raw) -> Any:
    pods = NodePods(SETTINGS, lambda: None, RECORDS)
    try:
        for raw in raws:
            pods.take(raw)
    except BadObject as error:
        return repr(error)
    return pods.all(), pods.limited_pods(), pods.presences()


@pytest.mark.parametrize("name", PODS)
def test_pod_changed_anywhere_is_known_as_if_it_had_never_been_different(name: str) -> None:
    """A field that is read and that the fingerprint leaves out would stay as it was."""
    raw = PODS[name]()
    for path in leaves(raw):
        for new in changed(raw, path):
            fresh = as_scheduler(new)
            assert fresh is None or as_scheduler(raw, new) == fresh, path
            alone, after = as_agent(new), as_agent(raw, new)
            assert not isinstance(alone, tuple) or not alone[0] or after == alone, path


def test_pod_with_other_labels_is_not_read_again_and_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    state, raw = ClusterCache(SETTINGS, records=RECORDS), running()
    state.pod_changed(raw)
    relabelled = copy.deepcopy(raw)
    relabelled["metadata"] |= {
        "labels": {"n": "2"},
        "resourceVersion": "2",
        "annotations": {**raw["metadata"]["annotations"], "other": "y"},
    }
    relabelled["spec"]["containers"][0]["image"] = "other"
    monkeypatch.setattr("scheduler.cluster.pod_reader.make_gpu_pod", lambda *_: pytest.fail("the pod was read again"))
    state.pod_changed(relabelled)
    known = state.gpu_pod("uid-p")
    assert known is not None
    assert (known.pod.labels, known.version) == ({"n": "2"}, "2")


def test_agent_is_not_woken_by_a_pod_with_other_labels() -> None:
    told: list[str] = []
    pods, raw = NodePods(SETTINGS, lambda: told.append("changed"), RECORDS), running()
    pods.take(raw)
    relabelled = copy.deepcopy(raw)
    relabelled["metadata"] |= {"labels": {"n": "2"}, "resourceVersion": "2"}
    pods.take(relabelled)
    assert told == ["changed"]


def test_pod_with_an_amended_record_is_read_again() -> None:
    pods, raw = NodePods(SETTINGS, lambda: None), running()
    raw["metadata"]["annotations"].pop(SEAL)
    pods.take(raw)
    (known,) = pods.all()
    pods.amend(known, {INDEX: "1"})
    amended = copy.deepcopy(raw)
    amended["metadata"]["annotations"][INDEX] = "1"
    pods.take(amended)
    pods.take(raw)
    assert {share.card for share in pods.all()[0].shares or () if share.container == "c"} == {0}


def too_many(*last: Raw) -> Raw:
    rows = [{"name": f"c{i}", "resources": {"requests": {"cpu": "1"}}} for i in range(budget.MAX_CONTAINERS + 1)]
    return b.pod("p", *rows, *last)


def test_oversized_pod_is_read_with_the_containers_that_tell_something() -> None:
    asking = [b.container(f"g{i}", 10, 256) for i in range(3)]
    nothing = {"name": "z", "resources": {"limits": {"nvidia.com/gpu": "0"}}}
    slices = {"name": "s", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    raw = too_many(nothing, *asking, slices)
    raw["status"]["containerStatuses"] = [{"name": "c7", "containerID": "x"}]
    read = read_pod(limit_containers(raw))
    assert [container.name for container in read.containers] == ["c7", "g0", "s"]
    assert read.started


def test_pod_of_ordinary_size_is_read_with_all_containers() -> None:
    raw = running()
    assert limit_containers(raw) is raw


def test_fingerprint_of_annotations_that_the_caller_reads_too() -> None:
    one, other = running(), running()
    other["metadata"]["annotations"]["other"] = "y"
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one, "other") != fingerprint(other, "other")
