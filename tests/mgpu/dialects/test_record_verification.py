"""Which records count: seals, times and peers, for every vocabulary."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given
from hypothesis import strategies as st

from mgpu import dialects
from mgpu.dialects import gpushare, mtgpu
from mgpu.dialects.record_verification import UNSEALED, Finding, Reason, RecordVerifier
from mgpu.model.pods import Pod
from mgpu.model.record_seals import SEAL, Keys, Seal, Signer, Subject, canonical_json
from tests.builders import mtgpupod, owned, pod

SINCE, BEFORE, AFTER = "2026-02-01T00:00:00Z", "2026-01-31T23:59:59Z", "2026-02-01T00:00:01Z"
OLD, NEW, STRANGE = (Signer(Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32)) for i in (1, 2, 3))
PUBLIC = {signer.id: signer.key.public_key() for signer in (OLD, NEW)}
SCHEDULER, AGENT = RecordVerifier(Keys(SINCE, PUBLIC, NEW)), RecordVerifier(Keys(SINCE, PUBLIC))
BOTH = pytest.mark.parametrize("records", [SCHEDULER, AGENT], ids=["scheduler", "agent"])
RECORDS: dict[str, dict[str, str]] = {
    "mgpu": {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"},
    "gpushare": {gpushare.INDEX: "1", gpushare.UNIT: "GiB", gpushare.ALLOCATION: '{"c":{"1":3}}'},
    "koordinator": {"scheduling.koordinator.sh/device-allocated": "{}", "mgpu.io/container-devices": "{}"},
    "slices": {"mgpu.io/slices-given": "{}"},
}
EVERY = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
MINE = Subject("uid-1", "ns", "p", "n1")


def bound(annotations: Mapping[str, str], subject: Subject = MINE, created: str = AFTER) -> Pod:
    return Pod(subject.namespace, subject.name, subject.uid, dict(annotations), node=subject.node, created=created)


def sealed(record: Mapping[str, str], subject: Subject = MINE, signer: Signer = NEW) -> dict[str, str]:
    return RecordVerifier(Keys(SINCE, PUBLIC, signer)).sealed(subject, record)


def finding(records: RecordVerifier, found: Pod) -> Finding | None:
    """And what does not count is taken from the pod, and nothing else."""
    left, judged = records.judge(found)
    why = judged.finding if judged else None
    gone = {key for key in found.annotations if dialects.is_placement_annotation(key)} if why else set()
    assert dict(left.annotations) == {k: v for k, v in found.annotations.items() if k not in gone}
    assert why is None or not any(map(dialects.is_placement_annotation, left.annotations))
    return why


@BOTH
@EVERY
@pytest.mark.parametrize("signer", [OLD, NEW], ids=["old", "new"])
def test_a_record_that_the_scheduler_sealed_counts(
    records: RecordVerifier, record: dict[str, str], signer: Signer
) -> None:
    assert finding(records, bound({**sealed(record, signer=signer), "team": "a"})) is None


@BOTH
@EVERY
def test_a_record_of_a_strange_key_does_not_count(records: RecordVerifier, record: dict[str, str]) -> None:
    why = finding(records, bound(sealed(record, signer=STRANGE)))
    assert why is not None
    assert why.reason == Reason.FORGED
    text = sealed(record)[SEAL].split(".")
    posing = ".".join([text[0], NEW.id, text[2], sealed(record, signer=STRANGE)[SEAL].split(".")[3]])
    assert finding(records, bound({**record, SEAL: posing})) is not None


@BOTH
@EVERY
@pytest.mark.parametrize(
    "other",
    [
        MINE._replace(uid="uid-2"),
        MINE._replace(namespace="other"),
        MINE._replace(name="q"),
        MINE._replace(node="n2"),
        MINE._replace(namespace="nsp", name=""),
    ],
    ids=["created again", "namespace", "name", "node", "shifted"],
)
def test_a_copied_record_does_not_count(records: RecordVerifier, record: dict[str, str], other: Subject) -> None:
    assert finding(records, bound(sealed(record), other)) is not None


@BOTH
@given(data=st.data())
def test_property_an_altered_record_does_not_count(records: RecordVerifier, data: st.DataObject) -> None:
    """Changed, with one part more of any vocabulary, with one less, or with another seal."""
    record = data.draw(st.sampled_from(list(RECORDS.values())))
    whole = sealed(record)
    key = data.draw(st.sampled_from(sorted(whole)))
    more = {k: v for other in RECORDS.values() for k, v in other.items() if k not in record}
    altered = data.draw(
        st.one_of(
            st.text(max_size=200).filter(lambda text: text != whole[key]).map(lambda text: {**whole, key: text}),
            st.just({k: v for k, v in whole.items() if k != key}),
            st.sampled_from(sorted(more.items())).map(lambda row: {**whole, row[0]: row[1]}),
        )
    )
    assert altered == {SEAL: whole[SEAL]} or finding(records, bound(altered)) is not None


def test_what_the_agent_writes_later_breaks_no_seal() -> None:
    record = {**RECORDS["gpushare"], gpushare.ASSIGNED: "false"}
    assert finding(AGENT, bound({**sealed(record), gpushare.ASSIGNED: "true"})) is None


@BOTH
@EVERY
def test_an_unsealed_record_counts_only_from_before_sealing(records: RecordVerifier, record: dict[str, str]) -> None:
    assert finding(records, bound(record, created=BEFORE)) is None
    for created in (SINCE, AFTER, ""):
        why = finding(records, bound(record, created=created))
        assert why is not None
        assert why.reason is Reason.UNSEALED


@EVERY
def test_a_peers_record_counts_unsealed_and_not_with_parts_of_another(record: dict[str, str]) -> None:
    peers = replace(AGENT, peers=frozenset(("koordinator", "gpushare")))
    theirs = set(record) <= {*RECORDS["koordinator"], *RECORDS["gpushare"]}
    assert (finding(peers, bound(record)) is None) == theirs
    assert finding(peers, bound({**record, "mgpu.io/slices-given": "{}"})) is not None
    assert finding(peers, bound({**record, SEAL: "x"})) is not None


@EVERY
def test_where_records_are_not_sealed_all_count_and_none_is_sealed(record: dict[str, str]) -> None:
    assert finding(UNSEALED, bound({**record, SEAL: "x"})) is None
    assert UNSEALED.sealed(MINE, record) == AGENT.sealed(MINE, record) == record
    assert SCHEDULER.sealed(MINE, {}) == {}


def test_a_pod_that_has_no_node_has_no_record_to_judge() -> None:
    assert SCHEDULER.judge(bound(RECORDS["mgpu"], MINE._replace(node=""))) == (
        bound(RECORDS["mgpu"], MINE._replace(node="")),
        None,
    )


@EVERY
def test_the_same_record_is_verified_once(record: dict[str, str]) -> None:
    for annotations in (sealed(record), record):
        _, first = SCHEDULER.judge(bound(annotations))
        _, again = SCHEDULER.judge(bound({**annotations, "other": "1"}), first)
        assert again is first
        _, moved = SCHEDULER.judge(bound(annotations, MINE._replace(node="n2")), first)
        assert moved is not first
        assert moved is not None
        assert moved.finding is not None


NEARLY = st.from_regex(r"v[12]\.[0-9a-fA-F]{15,17}\.[0-9A-Za-z._-]{0,129}\.[0-9a-f]{127,129}\s?", fullmatch=True)
"""Seals, and texts that are one character away from one: of any other text nothing is a seal."""


@given(NEARLY | st.text())
@example(f"v1.{'a' * 16}.uid-1.{'0' * 128}")
@example(f"v1.{'a' * 16}.uid-1.{'0' * 128}\n")
def test_property_no_text_is_a_seal_that_is_not_written_as_it_was_read(text: str) -> None:
    found = Seal.read(text)
    assert found is None or str(found) == text


# The Pods of MtgpuPods.


@BOTH
@EVERY
def test_a_record_of_a_former_installation_counts_on_pods_from_before_this_one(
    records: RecordVerifier, record: dict[str, str]
) -> None:
    """Pods outlive `make undeploy`, and the next installation has another key. What its own keys sealed is checked."""
    assert finding(records, bound(sealed(record, signer=STRANGE), created=BEFORE)) is None
    why = finding(records, bound({**sealed(record), "mgpu.io/slices-given": "changed"}, created=BEFORE))
    assert why is not None
    assert why.reason is Reason.FORGED


def own(name: str = "m", owner: str = "m", **more: Any) -> dict[str, Any]:
    """The Pod that the controller makes for `mtgpupod(name)`, without its seal."""
    env = [{"name": mtgpu.VISIBLE, "value": "GPU-n1-0"}]
    said = mtgpupod(name)["metadata"]["annotations"]
    raw = pod(name, {"name": "c", "env": env}, annotations={**said, **more}, node="n1")
    raw["metadata"] |= {"ownerReferences": [owned(owner)], "creationTimestamp": AFTER}
    return raw


def with_seal(raw: dict[str, Any], owner: str = "uid-m") -> dict[str, Any]:
    raw["metadata"]["annotations"] |= SCHEDULER.sealed_mtgpu(raw, owner)
    return raw


@BOTH
def test_the_controllers_pod_counts_also_without_its_owner(records: RecordVerifier) -> None:
    raw = with_seal(own())
    assert records.finding_of_mtgpu(raw) is None
    del raw["metadata"]["ownerReferences"]  # --cascade=orphan
    assert records.finding_of_mtgpu(raw) is None
    assert records.finding_of_mtgpu(pod("p", {"name": "c"})) is None


@BOTH
def test_a_pod_that_poses_as_an_mtgpupods_does_not_count(records: RecordVerifier) -> None:
    unsealed = records.finding_of_mtgpu(own())
    assert unsealed is not None
    assert unsealed.reason is Reason.UNSEALED
    seal = with_seal(own())["metadata"]["annotations"][SEAL]
    changed = own(**{SEAL: seal, mtgpu.REQUEST: "0.9"})
    other_card = own(**{SEAL: seal})
    other_card["spec"]["containers"][0]["env"][0]["value"] = "GPU-n1-1"
    other_node = own(**{SEAL: seal})
    other_node["spec"]["nodeName"] = "n2"
    bare = {**own(**{SEAL: seal}), "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}}
    adopted = own(owner="other", **{SEAL: seal})
    for forged in (own("other", **{SEAL: seal}), changed, other_card, other_node, bare, adopted, own(**{SEAL: "x"})):
        found = records.finding_of_mtgpu(forged)
        assert found is not None, json.dumps(forged)
        assert found.reason is Reason.FORGED


def test_a_pod_of_an_mtgpupod_from_before_sealing_or_of_a_peer_counts() -> None:
    raw = own()
    raw["metadata"]["creationTimestamp"] = BEFORE
    assert AGENT.finding_of_mtgpu(raw) is None
    assert replace(AGENT, peers=frozenset(("mtgpu",))).finding_of_mtgpu(own()) is None
    assert UNSEALED.finding_of_mtgpu(own()) is None


def test_verdict_of_a_record_does_not_count_for_another_with_the_same_text() -> None:
    index = "vke.volcengine.com/gpu-index-container-"
    good = bound(sealed({f"{index}a": "0", f"{index}b": "1"}))
    _, judged = SCHEDULER.judge(good)
    assert judged is not None
    assert judged.finding is None
    for separator in ("", ":", "\0", f"1:{index}b"):
        other = {f"{index}a": f"0{separator}{index}b{separator}1", SEAL: good.annotations[SEAL]}
        _, again = SCHEDULER.judge(bound(other), judged)
        assert again is not None
        assert again.finding is not None


@pytest.mark.parametrize("records", [SCHEDULER, AGENT, UNSEALED, RecordVerifier(peers=frozenset(["mgpu"]))])
def test_record_with_more_annotations_than_any_scheduler_writes_does_not_count(records: RecordVerifier) -> None:
    record = {f"vke.volcengine.com/gpu-index-container-{i}": "0" for i in range(1000)}
    why = finding(records, bound(record))
    assert why is not None
    assert (why.reason, "1000 annotations" in why.message) == (Reason.FORGED, True)


TEXTS = st.text() | st.text(st.characters(max_codepoint=127)) | st.text(st.characters(categories=["Cs", "Lu"]))


@given(TEXTS, st.dictionaries(TEXTS, TEXTS))
@example("".join(map(chr, range(128))), {'"\\/\x7f': "\u2028é😀", "\ud800": ""})
def test_canonical_form_is_that_of_the_json_module_so_that_seals_of_any_release_stay_valid(
    text: str, record: dict[str, str]
) -> None:
    texts = [text, sorted(record.items())]
    assert canonical_json(texts) == json.dumps(texts, separators=(",", ":")).encode()
