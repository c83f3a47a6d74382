"""Which allocation records count: sealed ones, those from before sealing came into force, and those of named peers.

The scheduler and the node agent pass every pod with a record through `RecordVerifier.judge`. A record that does not
count is removed from the pod before anything else reads it, as if it had never been written. docs/security.md describes
what this prevents; every refusal here has a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.model.budget import MAX_ANNOTATIONS, MAX_CONTAINERS
from mgpu.model.pods import Pod
from mgpu.model.record_seals import SEAL, Keys, Subject

_UNSIGNED = frozenset((SEAL, *(key for dialect in dialects.ALL for key in dialect.ACKNOWLEDGEMENTS)))
"""The node writes acknowledgements after the decision, and nothing is derived from them."""
_MOST = 2 * MAX_CONTAINERS
"""Annotations of a record. No vocabulary writes more than one for each container and a few for the pod."""


class Reason(StrEnum):
    """Why a record does not count; the reason of the Event on its pod."""

    UNSEALED = "UnsealedRecord"
    FORGED = "ForgedRecord"


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a record does not count.

    It does not hold the annotations of the record: users choose how many these are.
    """

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification with all that it depends on, so that an equal record needs no second one.

    Attributes:
        record: the digest of the record's annotations, its seal included.
        finding: why the record does not count; None where it counts.
    """

    subject: Subject
    created: str
    record: bytes
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class RecordVerifier:
    """Decides which records count. Immutable, and so safe for all threads.

    Attributes:
        keys: None where records are not sealed in this cluster.
        peers: vocabularies whose records count without a seal, since another scheduler writes them.
    """

    keys: Keys | None = None
    peers: frozenset[str] = frozenset()

    def judge(self, pod: Pod, before: Verdict | None = None) -> tuple[Pod, Verdict | None]:
        """Return the pod without a record that does not count, and the verdict; None where there is nothing to verify.

        Args:
            before: the verdict when the pod was read the last time.
        """
        if not pod.node or not pod.annotations:
            return pod, None
        record = {key: text for key, text in pod.annotations.items() if dialects.is_placement_annotation(key)}
        if not record or (self.keys is None and len(record) <= _MOST):
            return pod, None
        subject = Subject(pod.uid, pod.namespace, pod.name, pod.node)
        judged = Verdict(subject, pod.created, _digest(record), None)
        if before is not None and before == replace(judged, finding=before.finding):
            judged = before
        else:
            judged = replace(judged, finding=self._finding(judged, record))
        if judged.finding is None:
            return pod, judged
        kept = {key: text for key, text in pod.annotations.items() if key not in record}
        return replace(pod, annotations=kept), judged

    def sealed(self, subject: Subject, record: Mapping[str, str]) -> dict[str, str]:
        """Return the annotations of a decision, with their seal where records are sealed. An empty record has none."""
        if self.keys is None or self.keys.signer is None or not record:
            return dict(record)
        return {**record, SEAL: str(self.keys.signer.sign(subject, _signed(record)))}

    def _finding(self, judged: Verdict, record: Mapping[str, str]) -> Finding | None:
        if len(record) > _MOST:
            text = f"has {len(record)} annotations, more than the {_MOST} of any that a scheduler writes; it is ignored"
            return Finding(Reason.FORGED, f"the record of its cards {text}")
        if self.keys is None:
            return None
        seal = record.get(SEAL)
        if _is_of_before(judged.created, seal, self.keys):
            return None
        if seal is None:
            if self._is_of_peer(record):
                return None
            text = "has no seal, and only records that mgpu decided count; a peer's need its name in records.peers"
            return Finding(Reason.UNSEALED, f"the record of its cards {text}")
        why = self.keys.refusal_reason(judged.subject, _signed(record), seal)
        if why is None:
            return None
        text = f"the seal of the record of its cards does not count: {why}; the record is ignored"
        return Finding(Reason.FORGED, text)

    def _is_of_peer(self, record: Mapping[str, str]) -> bool:
        owners = [dialect for dialect in dialects.ALL if dialect.NAME in self.peers]
        return all(any(dialect.owns_annotation(key) for dialect in owners) for key in record)

    def sealed_mtgpu(self, raw: Mapping[str, object], owner: str) -> dict[str, str]:
        """Return the seal annotation of the Pod that the controller creates for the MtgpuPod with the uid `owner`."""
        if self.keys is None or self.keys.signer is None:
            return {}
        return {SEAL: str(self.keys.signer.sign(mtgpu.subject(raw, owner), mtgpu.sealed_content(raw)))}

    def finding_of_mtgpu(self, raw: Mapping[str, object]) -> Finding | None:
        """Return why a Pod that claims to be an MtgpuPod's is not, or None where it is, or claims nothing.

        The subject of its seal is the MtgpuPod, since the uid of a Pod is not known before it is created. A Pod without
        an owner was orphaned; a Pod whose seal names another owner was not created for its owner.
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
            return Finding(Reason.UNSEALED, "poses as the Pod of an MtgpuPod, and mgpu did not create it: no seal")
        content = mtgpu.sealed_content(raw)
        if len(content) > MAX_ANNOTATIONS + 1:  # the card is one of them
            why: str | None = f"it has {len(content) - 1} annotations, more than the {MAX_ANNOTATIONS} of any MtgpuPod"
        else:
            why = self.keys.refusal_reason(mtgpu.subject(raw, owner), content, text)
        if why is None:
            return None
        return Finding(Reason.FORGED, f"poses as the Pod of an MtgpuPod, and its seal does not count: {why}")


UNSEALED = RecordVerifier()
"""Of a cluster where records are not sealed: every readable record counts."""


def _is_of_before(created: str, seal: str | None, keys: Keys) -> bool:
    """Return whether an object was created before sealing came into force and has no seal of a present key.

    The API server's times sort as their texts do. A seal of an unknown key comes from an earlier installation, whose
    pods outlive it. It proves nothing, so it counts as no seal: an attacker who could write one could also leave it
    out.
    """
    return bool(created) and created < keys.since and (seal is None or not keys.names_known_key(seal))


def _digest(record: Mapping[str, str]) -> bytes:
    """Return the digest of a record. Each text follows its length, so that no two records have the same digest."""
    digest = sha256()
    for row in sorted(record.items()):
        for text in row:
            digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.digest()


def _signed(record: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in record.items() if key not in _UNSIGNED}
