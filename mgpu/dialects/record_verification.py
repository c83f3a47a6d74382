"""Decides which allocation records are valid, and seals new ones.

The scheduler (`scheduler.cluster`) and the agents (`deviceplugin.pods`) must call `RecordVerifier.judge` before they
read a record, and ignore an invalid one. `mgpu doctor` lists the invalid ones. The scheduler seals the records that it
writes. If records are sealed in the cluster, a record is valid in three cases: it has a valid seal, it has no seal of a
known key and its pod was created before sealing began, or it has no seal and belongs to a vocabulary in the setting
`records.peers`. A record with too many annotations is never valid. docs/security.md describes the attacks that this
prevents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.model.budget import MAX_ANNOTATIONS, MAX_CONTAINERS
from mgpu.model.pods import Pod
from mgpu.model.record_seals import SEAL, Keys, Subject, canonical_json
from mgpu.model.resizing import APPLIED

_UNSIGNED = frozenset((SEAL, APPLIED, *(key for dialect in dialects.ALL for key in dialect.ACKNOWLEDGEMENTS)))
"""The annotations that seals do not cover: the seal itself, and acknowledgements. The node writes acknowledgements
after the record is sealed, and no decision depends on them."""
_ROWS_OF_DIGEST = 32
_MAX_RECORD = 2 * MAX_CONTAINERS
"""The most annotations of a record. Each vocabulary writes at most one for each container and a few for the pod."""


class Reason(StrEnum):
    """Why a record is invalid. The values are the reasons of Events on the pod, so they must not change."""

    UNSEALED = "UnsealedRecord"
    FORGED = "ForgedRecord"


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why a record is invalid. The message quotes no annotations, because a pod may have very many."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification, and a digest of the input on which it depends.

    A caller that passes it to `RecordVerifier.judge` saves the verification of an unchanged record.

    Attributes:
        content: the digest of the input: the pod's subject and creationTimestamp, and the annotations of the record,
            including its seal.
        finding: the reason why the record is invalid; None if it is valid.
    """

    content: bytes
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class RecordVerifier:
    """Verifies records, and seals new ones. Instances are immutable, and therefore thread-safe.

    Attributes:
        keys: the keys of valid seals; None if records are not sealed in this cluster.
        peers: the vocabularies whose records are valid without a seal, since another scheduler writes such records.
    """

    keys: Keys | None = None
    peers: frozenset[str] = frozenset()

    def judge(self, pod: Pod, before: Verdict | None = None) -> tuple[Pod, Verdict | None]:
        """Return the pod, without its record if the record is invalid, and the verdict.

        The verdict is None if the pod is not bound or has no record. It is also None if records are not sealed, unless
        the record has more than `_MAX_RECORD` annotations.

        Args:
            before: the verdict of the previous call for the pod; None in the first call.
        """
        if not pod.node or not pod.annotations:
            return pod, None
        record = {key: text for key, text in pod.annotations.items() if dialects.is_placement_annotation(key)}
        judged = self.verdict(Subject(pod.uid, pod.namespace, pod.name, pod.node), pod.created, record, before)
        if judged is None or judged.finding is None:
            return pod, judged
        kept = {key: text for key, text in pod.annotations.items() if key not in record}
        return replace(pod, annotations=kept), judged

    def verdict(
        self, subject: Subject, created: str, record: Mapping[str, str], before: Verdict | None
    ) -> Verdict | None:
        """Return the verdict on the record of a bound pod; None in the cases that `judge` names.

        Args:
            created: the creationTimestamp of the pod.
        """
        if not record or (self.keys is None and len(record) <= _MAX_RECORD):
            return None
        content = _digest(subject, created, record)
        if before is not None and before.content == content:
            return before
        return Verdict(content, self._finding(subject, created, record))

    def sealed(self, subject: Subject, record: Mapping[str, str]) -> dict[str, str]:
        """Return the annotations of a record, with a seal if records are sealed and there are annotations."""
        if self.keys is None or self.keys.signer is None or not record:
            return dict(record)
        return {**record, SEAL: str(self.keys.signer.sign(subject, _signed(record)))}

    def _finding(self, subject: Subject, created: str, record: Mapping[str, str]) -> Finding | None:
        if len(record) > _MAX_RECORD:
            text = (
                f"has {len(record)} annotations, more than the {_MAX_RECORD} that a scheduler can write; it is ignored"
            )
            return Finding(Reason.FORGED, f"the record of its cards {text}")
        if self.keys is None:
            return None
        seal = record.get(SEAL)
        if _is_of_before(created, seal, self.keys):
            return None
        if seal is None:
            if self._is_of_peer(record):
                return None
            remedy = "if another scheduler writes such records, name its vocabulary in records.peers"
            return Finding(Reason.UNSEALED, f"the record of its cards has no seal and is ignored; {remedy}")
        reason = self.keys.refusal_reason(subject, _signed(record), seal)
        if reason is None:
            return None
        text = f"the seal of the record of its cards is not valid: {reason}; the record is ignored"
        return Finding(Reason.FORGED, text)

    def _is_of_peer(self, record: Mapping[str, str]) -> bool:
        owners = [dialect for dialect in dialects.ALL if dialect.NAME in self.peers]
        return all(any(dialect.owns_annotation(key) for dialect in owners) for key in record if key not in _UNSIGNED)

    def sealed_mtgpu(self, raw: Mapping[str, object], owner: str) -> dict[str, str]:
        """Return the annotation with the seal of the Pod that the controller creates for the MtgpuPod with UID `owner`.

        The result is {} if records are not sealed.
        """
        if self.keys is None or self.keys.signer is None:
            return {}
        return {SEAL: str(self.keys.signer.sign(mtgpu.subject(raw, owner), mtgpu.sealed_content(raw)))}

    def finding_of_mtgpu(self, raw: Mapping[str, object]) -> Finding | None:
        """Return the reason why a Pod is not accepted as the Pod of an MtgpuPod although it claims to be one.

        Returns None if the claim is accepted, if there is no claim, or if records are not sealed. The subject of the
        seal is the MtgpuPod, since the UID of a Pod is unknown before its creation. The seal of a Pod that has lost its
        owner stays valid. A seal that names an MtgpuPod other than the owner is not valid.
        """
        if self.keys is None:
            return None
        owner = mtgpu.claimed_mtgpupod(raw) or ""
        annotations = mtgpu.annotations_of(raw)
        if not (owner or mtgpu.GPUID in annotations):
            return None
        text = annotations.get(SEAL)
        if _is_of_before(mtgpu.created(raw), text, self.keys):
            return None
        if text is None:
            if mtgpu.NAME in self.peers:
                return None
            return Finding(Reason.UNSEALED, "claims to be the Pod of an MtgpuPod, but has no seal of mgpu")
        content = mtgpu.sealed_content(raw)
        if len(content) > MAX_ANNOTATIONS + 1:  # `content` has the card in addition to the annotations.
            reason: str | None = (
                f"it has {len(content) - 1} annotations, more than the {MAX_ANNOTATIONS} that an MtgpuPod may have"
            )
        else:
            reason = self.keys.refusal_reason(mtgpu.subject(raw, owner), content, text)
        if reason is None:
            return None
        return Finding(Reason.FORGED, f"claims to be the Pod of an MtgpuPod, but its seal is not valid: {reason}")


UNSEALED = RecordVerifier()
"""The verifier for clusters in which records are not sealed. All records of at most `_MAX_RECORD` annotations are
valid."""


def _is_of_before(created: str, seal: str | None, keys: Keys) -> bool:
    """Return whether an object is older than sealing and has no seal of a known key.

    The times of the API server can be compared as texts. A seal of an unknown key is from an earlier installation,
    whose pods may still run. Such a seal is ignored, since an attacker who could write it could also omit it.
    """
    return bool(created) and created < keys.since and (seal is None or not keys.names_known_key(seal))


def _digest(subject: Subject, created: str, record: Mapping[str, str]) -> bytes:
    """Return the digest of the input of a verification.

    The rows of a large record are digested in parts, so that its JSON does not exist as a whole. An array of JSON tells
    where it ends, so different inputs never give the hash function the same bytes.
    """
    digest = sha256(canonical_json([*subject, created]))
    rows = sorted(record.items())
    for i in range(0, len(rows), _ROWS_OF_DIGEST):
        digest.update(canonical_json(rows[i : i + _ROWS_OF_DIGEST]))
    return digest.digest()


def _signed(record: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in record.items() if key not in _UNSIGNED}
