"""A pod that is read like another one of its template is the pod that is read afresh."""

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from mgpu import dialects
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.dialects.watched_pods import content_of
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.record_seals import Keys, Signer, Subject
from mgpu.settings import load_settings
from scheduler.cluster import pod_reader
from scheduler.cluster.gpu_pods import GpuPod, recorded_shares
from scheduler.cluster.pod_reader import PodReader, ReadPod, read_afresh
from tests import builders as b

Raw = dict[str, Any]

SETTINGS = load_settings("dialects: {mgpu: {minGPUMemory: 512}, koordinator: {enabled: false}}")
_SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
SEALED = RecordVerifier(Keys("2026-02-01T00:00:00Z", {_SIGNER.id: _SIGNER.key.public_key()}, _SIGNER))

CLAIMS = [{"containerName": "c", "resourceName": name} for name in (b.CORE, b.MEMORY)]
ALLOCATED = "scheduling.koordinator.sh/device-allocated"
HALF = '{"gpu":[{"minor":1,"resources":{"koordinator.sh/gpu-core":"50","koordinator.sh/gpu-memory-ratio":"50"}}]}'


class Eager(PodReader):
    """Remembers the first pod of each template."""

    def _is_second(self, template: bytes) -> bool:
        del template
        return True


FIELDS: dict[str, list[Any]] = {
    "name": ["p", "q"],
    "node": ["n1", "n2", ""],
    "resourceVersion": ["1", "2"],
    "labels": [{}, {"a": "b"}, {"a": "x" * 5000}],
    "created": ["2026-01-01T00:00:00Z", "2026-03-01T00:00:00Z"],
    "deleted": [{}, {"deletionTimestamp": "2026-03-02T00:00:00Z"}],
    "sealed for": [None, "itself", "another"],
    "container": [
        b.container("c", 50, 1024),
        b.container("c", 50, 256),  # less than the minimum in the settings
        b.container("c", 200),
        b.container("d"),
        {"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}},
        {"name": "c", "resources": {"limits": {"koordinator.sh/gpu": "50"}}},  # disabled in the settings
        {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "2"}}},
    ],
    "record": [
        {},
        {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"},
        {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0,1"},
        {"vke.volcengine.com/gpu-index-container-d": "0"},
        {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "80"},
        {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_UNIT": "MiB", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "7"},
        {ALLOCATED: HALF},
        {ALLOCATED: "{}"},
        {f"vke.volcengine.com/gpu-index-container-{i}": "0" for i in range(600)},  # more than a scheduler writes
    ],
    "annotations": [
        {},
        {"other": "x"},
        {"mgpu.io/card-models": "A100"},
        {"mgpu.io/card-models": ""},
        {"mgpu.io/suggested-node": "n2"},
        {"lsalab.nthu/GPUID": "abc"},
        {"scheduling.k8s.io/group-name": "g"},
    ],
    "spec": [
        {},
        {"priority": 5},
        {"schedulerName": "s"},
        {"schedulingGates": [{"name": "g"}]},
        {"overhead": {"cpu": "1"}},
        {"schedulingGroup": {"podGroupName": "g"}},
    ],
    "status": [
        {},
        {"phase": "Running", "startTime": "2026-03-01T00:00:01Z"},
        {"phase": "Succeeded"},
        {"nominatedNodeName": "n2"},
        {"containerStatuses": [{"name": "c", "containerID": "x"}]},
        {"extendedResourceClaimStatus": {"requestMappings": CLAIMS}},
    ],
}
"""Fields of pods with their values. The first ones are those of a running pod."""


@st.composite
def similar_pods(draw: st.DrawFn) -> list[Raw]:
    """Pods of which each differs from one pod in a field or two, so that many have the same template."""
    first = {name: draw(st.sampled_from(values)) for name, values in FIELDS.items()}
    changes = st.lists(st.sampled_from(sorted(FIELDS)), max_size=2)
    pods = []
    for _ in range(draw(st.integers(2, 8))):
        changed = {name: draw(st.sampled_from(FIELDS[name])) for name in draw(changes)}
        pods.append(pod_of(first | changed))
    return pods


def pod_of(values: dict[str, Any]) -> Raw:
    name, node, record = values["name"], values["node"], values["record"]
    if values["sealed for"] and node:
        of = name if values["sealed for"] == "itself" else "another"
        record = SEALED.sealed(Subject(f"uid-{of}", "default", of, node), record)
    raw = b.pod(name, values["container"], annotations={**record, **values["annotations"]}, node=node)
    meta = {"resourceVersion": values["resourceVersion"], "labels": values["labels"], **values["deleted"]}
    raw["metadata"] |= {"creationTimestamp": values["created"], **meta}
    raw["spec"] |= values["spec"]
    raw["status"] |= values["status"]
    return raw


def of_interest(read: ReadPod) -> tuple[Any, ...]:
    """Of a pod without GPUs, the labels and the annotations that mgpu reads matter; it is not stored."""
    if read.gpu_pod is None:
        pod = dialects.drop_unread_annotations(read.pod)
        kept = {key: text for key, text in pod.annotations.items() if not dialects.is_placement_annotation(key)}
        return (pod, kept)
    return read.pod, read.pod.annotations, read.pod.labels, read.request, read.gpu_pod, read.gpu_pod.fingerprint


def shares_of(gpu_pod: GpuPod | None) -> tuple[Share, ...] | str | None:
    try:
        return None if gpu_pod is None else recorded_shares(gpu_pod)
    except BadObject as error:
        return str(error)


def check(raws: list[Raw], records: RecordVerifier) -> None:
    reader = Eager(SETTINGS, records)
    for raw in raws:
        content = content_of(raw)
        expected = read_afresh(raw, content, SETTINGS, records)
        found = reader.read(raw, content, None)
        assert of_interest(found) == of_interest(expected)
        assert shares_of(found.gpu_pod) == shares_of(expected.gpu_pod)


@pytest.mark.parametrize("records", [SEALED, UNSEALED])
@given(similar_pods())
def test_pods_are_read_as_afresh(records: RecordVerifier, raws: list[Raw]) -> None:
    check(raws, records)


PLAIN = {name: values[0] for name, values in FIELDS.items()}
GPUSHARE, KOORDINATOR = FIELDS["container"][4], FIELDS["container"][5]


@pytest.mark.parametrize(
    "base",
    [
        PLAIN,
        PLAIN | {"record": FIELDS["record"][1]},
        PLAIN | {"record": FIELDS["record"][1], "sealed for": "itself", "created": FIELDS["created"][1]},
        PLAIN | {"container": GPUSHARE, "record": FIELDS["record"][4]},
        PLAIN | {"container": KOORDINATOR, "record": FIELDS["record"][6]},
        PLAIN | {"record": FIELDS["record"][1], "status": FIELDS["status"][5]},
        PLAIN | {"node": "", "status": FIELDS["status"][3]},
    ],
    ids=range(7),
)
def test_every_field_that_is_read_makes_a_difference(base: dict[str, Any]) -> None:
    """Each pair of pods that differ in one field is read in both orders."""
    for name, values in FIELDS.items():
        for value in values:
            pair = [pod_of(base), pod_of(base | {name: value})]
            check(pair, SEALED)
            check(pair[::-1], SEALED)


def test_pods_of_a_template_share_what_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Eager(SETTINGS, SEALED)
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    read = []
    for name in ("p", "q", "r"):
        sealed = SEALED.sealed(Subject(f"uid-{name}", "default", name, "n1"), record)
        raw = b.share(name, annotations=sealed, node="n1")
        raw["metadata"] |= {"labels": {"app": "a"}, "creationTimestamp": "2026-03-01T00:00:00Z"}
        gpu_pod = reader.read(raw, content_of(raw), None).gpu_pod
        assert gpu_pod is not None
        read.append(gpu_pod)
        monkeypatch.setattr(pod_reader, "make_gpu_pod", lambda *_: pytest.fail("the pod was read afresh"))
    _, one, other = read
    assert one.request is other.request
    assert one.shares is not None
    assert one.shares is other.shares
    assert one.pod.annotations is other.pod.annotations
    assert one.pod.labels is other.pod.labels


def test_what_users_choose_is_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_reader, "_MAX_TEMPLATES", 4)
    monkeypatch.setattr(pod_reader, "_MAX_RECORDS", 8)
    reader = Eager(SETTINGS, UNSEALED)

    def read(raw: Raw) -> int:
        reader.read(raw, content_of(raw), None)
        return len(reader._templates)

    assert [read(b.share(f"p{mib}", mib=mib)) for mib in range(1024, 1030)] == [1, 2, 3, 4, 1, 2]
    assert read(b.share("large", annotations={"mgpu.io/card-models": "A" * 5000})) == 2
    for i in range(12):
        record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(i)}
        read(b.share("bound", annotations=record, node="n1"))
        assert sum(len(template.placed) for template in reader._templates.values()) <= 8
    (remembered,) = (template.placed for template in reader._templates.values() if template.placed)
    assert len(remembered) == 3, "the first pod is read afresh, and after eight records all are forgotten"


def test_templates_are_remembered_from_their_second_pod_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_reader, "_MAX_SEEN", 4)
    reader = PodReader(SETTINGS, UNSEALED)

    def read(mib: int) -> int:
        raw = b.share("p", mib=mib)
        reader.read(raw, content_of(raw), None)
        return len(reader._templates)

    assert [read(mib) for mib in (1024, 1025, 1024, 1024, 1025)] == [0, 0, 1, 1, 2]
    assert [read(mib) for mib in (1026, 1027, 1028, 1026, 1026)] == [2, 2, 2, 2, 3], "after four all are forgotten"
