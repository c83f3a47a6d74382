"""With seals, the agent delivers cards only for allocation records that the scheduler sealed."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects import gpushare, is_placement_annotation, mtgpu
from mgpu.dialects.record_verification import Reason, RecordVerifier
from mgpu.model.pods import read_pod
from mgpu.model.record_seals import Keys, Signer, Subject
from mgpu.settings import load_settings
from tests.builders import cards, owned, pod
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.records import RECORD, decided

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
SINCE, PUBLIC = "2026-01-01T00:00:00Z", {SIGNER.id: SIGNER.key.public_key()}
AGENT, SCHEDULER = RecordVerifier(Keys(SINCE, PUBLIC)), RecordVerifier(Keys(SINCE, PUBLIC, SIGNER))
FIRST = ["1", "2"]


def sealed(raw: dict[str, Any], scheduler: RecordVerifier = SCHEDULER) -> dict[str, Any]:
    read = read_pod(raw)
    record = {key: value for key, value in read.annotations.items() if is_placement_annotation(key)}
    subject = Subject(read.uid, read.namespace, read.name, read.node)
    annotations = {**read.annotations, **scheduler.sealed(subject, record)}
    return {**raw, "metadata": {**raw["metadata"], "annotations": annotations}}


def of_node(name: str, card: str, core: int = 2) -> dict[str, Any]:
    raw = decided(name, card, core)
    raw["spec"]["nodeName"] = "n1"
    return raw


def taken(pods: NodePods, raw: dict[str, Any]) -> GpuPod:
    pods.take(raw)
    known = pods.by_uid(raw["metadata"]["uid"])
    assert known is not None
    return known


@pytest.fixture
def fake_node(tmp_path: Path) -> FakeNode:
    made = FakeNode(tmp_path, wait_seconds=0.01, records=AGENT)
    made.cards = cards(2)
    return made


def test_pod_with_a_sealed_record_starts(fake_node: FakeNode) -> None:
    fake_node.deploy(sealed(of_node("p", "1")), FIRST)
    fake_node.start(FIRST)
    assert not fake_node.refusals


def running(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "status": {"phase": "Running", "containerStatuses": [{"name": "c", "containerID": "x://1"}]}}


def with_record(raw: dict[str, Any], card: str) -> dict[str, Any]:
    """Return the same pod, with the same seal, but another card in its record."""
    annotations = {**raw["metadata"]["annotations"], RECORD + "c": card}
    return {**raw, "metadata": {**raw["metadata"], "annotations": annotations}}


OTHER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(31) + b"1"))
ELSEWHERE = RecordVerifier(Keys(SINCE, {OTHER.id: OTHER.key.public_key()}, OTHER))


@pytest.mark.parametrize("cause", ["unknown key", "changed record", "changed record, new agent"])
def test_restarted_container_with_an_invalid_record_keeps_its_card(fake_node: FakeNode, cause: str) -> None:
    """A rotated key or a stolen token must not keep a user's container from starting again."""
    raw = sealed(of_node("p", "1"))
    fake_node.pods.take(raw)
    answer = fake_node.admit(FIRST, "uid-p")
    fake_node.start(FIRST)
    had = fake_node.env(answer)
    if cause == "unknown key":
        fake_node._records = ELSEWHERE
        fake_node.restart(running(raw))
    else:
        fake_node.pods.take(running(with_record(raw, "0")))
        if cause.endswith("agent"):
            fake_node.restart(running(with_record(raw, "0")))
    known = fake_node.pods.by_uid("uid-p")
    assert known is not None
    assert known.finding is not None
    fake_node.start(FIRST)
    assert fake_node.env(answer) == had
    assert not fake_node.refusals


def test_card_of_a_running_pod_with_an_invalid_record_stays_held(fake_node: FakeNode) -> None:
    raw = sealed(of_node("p", "1", core=99))
    fake_node.pods.take(raw)
    fake_node.admit(FIRST, "uid-p")
    fake_node.start(FIRST)
    fake_node._records = ELSEWHERE
    fake_node.restart(running(raw), sealed(of_node("later", "1"), ELSEWHERE))
    fake_node.admit(["3", "4"], "uid-later")
    with pytest.raises(Refused, match="insufficient capacity"):
        fake_node.start(["3", "4"])


def test_new_container_of_a_running_pod_with_an_invalid_record_is_refused(fake_node: FakeNode) -> None:
    """Another container of the pod has run."""
    raw = of_node("p", "1")
    (container,) = raw["spec"]["containers"]
    raw["spec"]["containers"].append({**container, "name": "d"})
    fake_node.pods.take(running(raw))
    fake_node.admit(FIRST, "uid-p", "d")
    with pytest.raises(Refused, match=r"no cards have been decided .* has no seal"):
        fake_node.start(FIRST)


@pytest.mark.parametrize("forge", ["unsealed", "copied"])
def test_pod_with_a_forged_record_is_refused_until_it_is_sealed(fake_node: FakeNode, forge: str) -> None:
    raw = of_node("thief", "1")
    if forge == "copied":
        raw["metadata"]["annotations"] = sealed(of_node("victim", "1"))["metadata"]["annotations"]
    fake_node.pods.take(raw)
    fake_node.admit(FIRST, "uid-thief")
    with pytest.raises(
        Refused, match=r"no cards have been decided for the pod within 0.01 s; the (seal of the )?record"
    ):
        fake_node.start(FIRST)
    fake_node.pods.take(sealed(of_node("thief", "0")))  # as the scheduler decides it late
    fake_node.start(FIRST)


def test_record_is_verified_again_when_annotations_change() -> None:
    pods = NodePods(load_settings(), lambda: None, AGENT)
    good = sealed(of_node("p", "1"))
    assert taken(pods, good).shares
    forged = {
        **good,
        "metadata": {**good["metadata"], "annotations": {**good["metadata"]["annotations"], RECORD + "c": "0"}},
    }
    known = taken(pods, forged)
    assert known.shares is None
    assert known.finding is not None
    assert known.finding.reason is Reason.FORGED
    assert taken(pods, good).shares


def test_unsealed_pod_of_an_mtgpupod_gets_no_limits() -> None:
    pods = NodePods(load_settings(), lambda: None, AGENT)
    said = {mtgpu.REQUEST: "0.2", mtgpu.LIMIT: "1", mtgpu.MEMORY: "1024", mtgpu.GPUID: "zxcvb"}
    env = [{"name": mtgpu.VISIBLE, "value": "GPU-n1-0"}]
    raw = pod("m", {"name": "c", "env": env}, annotations=said, node="n1")
    raw["metadata"]["ownerReferences"] = [owned()]
    pods.take(raw)
    assert pods.limited_pods() == ()
    raw["metadata"]["annotations"] |= SCHEDULER.sealed_mtgpu(raw, "uid-m")
    pods.take(raw)
    assert [limited.name for limited in pods.limited_pods()] == ["m"]


def test_acknowledgement_of_a_gpushare_pod_keeps_its_sealed_record_valid() -> None:
    pods = NodePods(load_settings(), lambda: None, AGENT)
    own = {"name": "c", "resources": {"limits": {gpushare.MEMORY: "3"}}}
    record = {gpushare.INDEX: "0", gpushare.ASSIGNED: "false", gpushare.ALLOCATION: '{"c":{"0":3}}'}
    known = taken(pods, sealed(pod("p", own, annotations=record, node="n1")))
    pods.amend(known, {gpushare.ASSIGNED: "true"})
    again = pods.by_uid("uid-p")
    assert again is not None
    assert again.shares == known.shares


def test_sealed_records_are_not_exchanged_without_cdi(tmp_path: Path) -> None:
    """The agent has no key, so it cannot change a record."""
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.01, records=AGENT)
    for name, card in (("p", "0"), ("q", "1")):
        fake_node.pods.take(sealed(of_node(name, card)))
    fake_node.admit(FIRST, "uid-q")  # Allocate assumed another order
    with pytest.raises(Refused, match="its record is sealed, so that only the scheduler can change it; delete the pod"):
        fake_node.start(FIRST)
    assert fake_node.written == []
