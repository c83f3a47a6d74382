"""The agent shows cards for records that the scheduler sealed, and for no others."""

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
from tests.deviceplugin.desk import RECORD, Desk, decided

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
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path, wait_seconds=0.01, records=AGENT)
    made.cards = cards(2)
    return made


def test_a_sealed_record_starts_its_pod_on_its_card(desk: Desk) -> None:
    desk.pods.take(sealed(of_node("p", "1")))
    desk.admit(FIRST, "uid-p")
    desk.start(FIRST)
    assert not desk.refusals


def running(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "status": {"phase": "Running", "containerStatuses": [{"name": "c", "containerID": "x://1"}]}}


def with_record(raw: dict[str, Any], card: str) -> dict[str, Any]:
    """The same pod and seal, and another card in its record."""
    annotations = {**raw["metadata"]["annotations"], RECORD + "c": card}
    return {**raw, "metadata": {**raw["metadata"], "annotations": annotations}}


OTHER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(31) + b"1"))
ELSEWHERE = RecordVerifier(Keys(SINCE, {OTHER.id: OTHER.key.public_key()}, OTHER))


@pytest.mark.parametrize("cause", ["unknown key", "changed record", "changed record, new agent"])
def test_running_pod_record_stops_counting_its_container_starts_again_on_its_card(desk: Desk, cause: str) -> None:
    """A key that was rotated past this agent, or a stolen token, must not end a user's pod at its next restart."""
    raw = sealed(of_node("p", "1"))
    desk.pods.take(raw)
    answer = desk.admit(FIRST, "uid-p")
    desk.start(FIRST)
    had = desk.env(answer)
    if cause == "unknown key":
        desk._records = ELSEWHERE
        desk.restart(running(raw))
    else:
        desk.pods.take(running(with_record(raw, "0")))
        if cause.endswith("agent"):
            desk.restart(running(with_record(raw, "0")))
    known = desk.pods.by_uid("uid-p")
    assert known is not None
    assert known.finding is not None
    desk.start(FIRST)
    assert desk.env(answer) == had
    assert not desk.refusals


def test_running_pod_record_stops_counting_its_card_is_not_given_to_another(desk: Desk) -> None:
    raw = sealed(of_node("p", "1", core=99))
    desk.pods.take(raw)
    desk.admit(FIRST, "uid-p")
    desk.start(FIRST)
    desk._records = ELSEWHERE
    desk.restart(running(raw), sealed(of_node("later", "1"), ELSEWHERE))
    desk.admit(["3", "4"], "uid-later")
    with pytest.raises(Refused, match="no room"):
        desk.start(["3", "4"])


def test_running_pod_record_stops_counting_a_container_that_was_given_no_card_is_refused(desk: Desk) -> None:
    """Another container of the pod has run."""
    raw = of_node("p", "1")
    (container,) = raw["spec"]["containers"]
    raw["spec"]["containers"].append({**container, "name": "d"})
    desk.pods.take(running(raw))
    desk.admit(FIRST, "uid-p", "d")
    with pytest.raises(Refused, match=r"no cards have been decided .* has no seal"):
        desk.start(FIRST)


@pytest.mark.parametrize("forge", ["unsealed", "copied"])
def test_a_forged_record_starts_nothing_and_says_why(desk: Desk, forge: str) -> None:
    raw = of_node("thief", "1")
    if forge == "copied":
        raw["metadata"]["annotations"] = sealed(of_node("victim", "1"))["metadata"]["annotations"]
    desk.pods.take(raw)
    desk.admit(FIRST, "uid-thief")
    with pytest.raises(
        Refused, match=r"no cards have been decided for the pod within 0.01 s; the (seal of the )?record"
    ):
        desk.start(FIRST)
    desk.pods.take(sealed(of_node("thief", "0")))  # as the scheduler decides it late
    desk.start(FIRST)


def test_what_counts_is_looked_at_again_when_the_annotations_change() -> None:
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


def test_a_pod_that_poses_as_an_mtgpupods_gets_no_limits() -> None:
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


def test_that_a_gpushare_pod_was_given_its_card_is_written_beside_its_seal() -> None:
    pods = NodePods(load_settings(), lambda: None, AGENT)
    own = {"name": "c", "resources": {"limits": {gpushare.MEMORY: "3"}}}
    record = {gpushare.INDEX: "0", gpushare.ASSIGNED: "false", gpushare.ALLOCATION: '{"c":{"0":3}}'}
    known = taken(pods, sealed(pod("p", own, annotations=record, node="n1")))
    pods.amend(known, {gpushare.ASSIGNED: "true"})
    again = pods.by_uid("uid-p")
    assert again is not None
    assert again.shares == known.shares


def test_without_cdi_a_container_on_the_cards_of_an_equal_pod_is_refused(tmp_path: Path) -> None:
    """Its record cannot be made to say so: the agent has no key."""
    desk = Desk(tmp_path, cdi=False, wait_seconds=0.01, records=AGENT)
    for name, card in (("p", "0"), ("q", "1")):
        desk.pods.take(sealed(of_node(name, card)))
    desk.admit(FIRST, "uid-q")  # the kubelet takes them in another order than Allocate guessed
    with pytest.raises(Refused, match="its record is sealed, so that only the scheduler can change it; delete the pod"):
        desk.start(FIRST)
    assert desk.written == []
