"""Which records count: those that mgpu sealed, those from before sealing came into force, and those of named peers.

The scheduler and the node agent read the placement annotations of a pod through `RecordVerifier.judge`. A record that
does not count is taken from the pod before anything else reads it, as if it had never been written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256

from mgpu import dialects
from mgpu.dialects import gpushare, mtgpu
from mgpu.model.budget import ANNOTATIONS, CONTAINERS
from mgpu.model.pods import Pod
from mgpu.model.record_seals import SEAL, Keys, Subject

_MUTABLE = frozenset((gpushare.ASSIGNED,))
"""The node agent changes it after the decision, and nothing is derived from it."""
_MOST = 2 * CONTAINERS
"""Annotations of a record. No vocabulary writes more than one for each container, and a few for the pod."""


class Reason(StrEnum):
    """Why a record does not count; the reason of the Event on its pod."""

    UNSEALED = "UnsealedRecord"
    FORGED = "ForgedRecord"


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that does not count. Its pod is read without its annotations, of which users choose the number."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of a record, with all that this depends on: the same again needs no second verification.

    record: the digest of its annotations, its seal included.
    """

    subject: Subject
    created: str
    record: bytes
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class RecordVerifier:
    """keys None: records are not sealed on this cluster. peers: vocabularies whose records count without a seal."""

    keys: Keys | None = None
    peers: frozenset[str] = frozenset()

    def judge(self, pod: Pod, before: Verdict | None = None) -> tuple[Pod, Verdict | None]:
        """The pod with the record that counts, and what was found; None: there is nothing to find.

        before: what was found when the pod was read the last time.
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
        """The annotations of a decision with their seal, where records are sealed. An empty record needs none."""
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
        why = self.keys.refusal(judged.subject, _signed(record), seal)
        if why is None:
            return None
        text = f"the seal of the record of its cards does not count: {why}; the record is ignored"
        return Finding(Reason.FORGED, text)

    def _is_of_peer(self, record: Mapping[str, str]) -> bool:
        owners = [dialect for dialect in dialects.ALL if dialect.NAME in self.peers]
        return all(any(dialect.owns_annotation(key) for dialect in owners) for key in record)

    # The Pods of MtgpuPods.

    def sealed_mtgpu(self, raw: Mapping[str, object], owner: str) -> dict[str, str]:
        """The annotations of the Pod that the controller creates for the MtgpuPod with this uid, with their seal."""
        said = mtgpu.said(raw)
        if self.keys is None or self.keys.signer is None:
            return {}
        return {SEAL: str(self.keys.signer.sign(mtgpu.subject(raw, owner), said))}

    def finding_of_mtgpu(self, raw: Mapping[str, object]) -> Finding | None:
        """Why a Pod that poses as the one of an MtgpuPod is none; None: it is one, or does not pose as one.

        Its subject is the MtgpuPod, since the uid of a Pod is not known before it is created; so its seal names it. A
        Pod without an owner was orphaned; one with another owner than its seal says was not made for that owner.
        """
        if self.keys is None:
            return None
        owner, annotations = mtgpu.mtgpupod_of(raw), mtgpu.annotations_of(raw)
        if not (owner or mtgpu.GPUID in annotations):
            return None
        text = annotations.get(SEAL)
        if _is_of_before(mtgpu.created(raw), text, self.keys):
            return None
        if text is None:
            if mtgpu.NAME in self.peers:
                return None
            return Finding(Reason.UNSEALED, "poses as the Pod of an MtgpuPod, and mgpu did not create it: no seal")
        said = mtgpu.said(raw)
        if len(said) > ANNOTATIONS + 1:  # the card is one of them
            why: str | None = f"it has {len(said) - 1} annotations, more than the {ANNOTATIONS} of any MtgpuPod"
        else:
            why = self.keys.refusal(mtgpu.subject(raw, owner), said, text)
        if why is None:
            return None
        return Finding(Reason.FORGED, f"poses as the Pod of an MtgpuPod, and its seal does not count: {why}")


UNSEALED = RecordVerifier()
"""Records are not sealed: every one that can be read counts."""


def _is_of_before(created: str, seal: str | None, keys: Keys) -> bool:
    """Return whether the API server created this before sealing came into force, and no key of now has sealed it.

    The times of the API server sort as their texts do. A seal of an unknown key is what an installation leaves on pods
    that outlive it: its successor has a key of its own. Whoever could write such a seal could as well leave it out.
    """
    return bool(created) and created < keys.since and (seal is None or not keys.know(seal))


def _digest(record: Mapping[str, str]) -> bytes:
    """Each text after its length: no two records have one digest, so no verdict counts for another record."""
    digest = sha256()
    for row in sorted(record.items()):
        for text in row:
            digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.digest()


def _signed(record: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in record.items() if key != SEAL and key not in _MUTABLE}
