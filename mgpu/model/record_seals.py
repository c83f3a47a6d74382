"""Creates and verifies seals, the signatures that prove that mgpu decided an allocation record.

The scheduler signs its decisions with Ed25519 and writes the seal together with the record. A seal is valid for one
object on one node with exactly the signed annotations. It must not be valid on another pod, on a later pod of the same
name, or after one of these annotations was changed, added or removed (docs/security.md).
`mgpu.dialects.record_verification` seals records in the scheduler, and verifies the seals in the scheduler, the agents
and `mgpu doctor`.
"""

import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Self

import orjson

if TYPE_CHECKING:
    # At run time it is imported with the keys: it takes 7 MiB, and agents without keys and most commands need none.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SEAL = "mgpu.io/seal"
"""The annotation with the seal of the pod's placement annotations: `v1.<key id>.<UID of the subject>.<signature>`."""

_DOMAIN = "mgpu-record-v1"
"""The first element of all signed content. Because of it, a signature for another purpose is never a valid seal."""
_CANONICAL = json.JSONEncoder(separators=(",", ":"))
_FORM = re.compile(
    r"v1\.(?P<key>[0-9a-f]{16})\.(?P<subject>[0-9A-Za-z-]{1,128})\.(?P<signature>[0-9a-f]{128})", re.ASCII
)


class Subject(NamedTuple):
    """The object for which a record was decided.

    Attributes:
        uid: the UID of the pod; for the Pod of an MtgpuPod, the UID of the MtgpuPod.
    """

    uid: str
    namespace: str
    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of the annotation `SEAL`.

    Attributes:
        key: the id of the key (`key_id`).
        subject: the UID of the object for which the record was decided (`Subject.uid`).
        signature: the signature in hexadecimal digits.
    """

    key: str
    subject: str
    signature: str

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the seal in the text of an annotation, or None if it has another format."""
        match = _FORM.fullmatch(text)
        return cls(match["key"], match["subject"], match["signature"]) if match else None

    def __str__(self) -> str:
        return f"v1.{self.key}.{self.subject}.{self.signature}"


@dataclass(frozen=True)
class Signer:
    """Signs records with a private key, which only the scheduler has."""

    key: "Ed25519PrivateKey"

    @cached_property
    def id(self) -> str:
        return key_id(self.key.public_key())

    def sign(self, subject: Subject, record: Mapping[str, str]) -> Seal:
        return Seal(self.id, subject.uid, self.key.sign(_content(subject, record)).hex())


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys whose seals are valid.

    Attributes:
        since: the time since which records have been sealed, in the format of `creationTimestamp`.
        public: the public keys, by key id.
        signer: the signer with the private key; None in a process that only verifies.
    """

    since: str
    public: Mapping[str, "Ed25519PublicKey"]
    signer: Signer | None = None

    def names_known_key(self, text: str) -> bool:
        """Return whether a text is a seal with the id of one of these keys. The signature is not verified."""
        seal = Seal.read(text)
        return seal is not None and seal.key in self.public

    def refusal_reason(self, subject: Subject, record: Mapping[str, str], text: str) -> str | None:
        """Return the reason why the seal in `text` is not valid for a subject's record, or None if it is valid."""
        seal = Seal.read(text)
        if seal is None:
            return "it does not have the format of a seal"
        if seal.subject != subject.uid:
            return f"it was made for the object with uid {seal.subject}"
        if self.signer is not None and seal.key == self.signer.id:
            # Ed25519 is deterministic. Signing the record again takes a third of the time of verifying the seal.
            expected = self.signer.key.sign(_content(subject, record)).hex()
            return None if hmac.compare_digest(expected, seal.signature) else _MISMATCH
        public = self.public.get(seal.key)
        if public is None:
            return f"no key with the id {seal.key} is configured"
        from cryptography.exceptions import InvalidSignature

        try:
            public.verify(bytes.fromhex(seal.signature), _content(subject, record))
        except InvalidSignature:
            return _MISMATCH
        return None


_MISMATCH = "it was made for another record, pod, or node, or the record has been changed"


def key_id(key: "Ed25519PublicKey") -> str:
    """Return the id that a key has in seals: the first 16 hexadecimal digits of the SHA-256 of its 32 bytes."""
    return sha256(key.public_bytes_raw()).hexdigest()[:16]


def _content(subject: Subject, record: Mapping[str, str]) -> bytes:
    """Return the signed content in a canonical form, with the annotations in the order of their keys."""
    return canonical_json([_DOMAIN, *subject, sorted(record.items())])


def canonical_json(texts: Sequence[object]) -> bytes:
    """Return nested sequences of texts as JSON in ASCII, without spaces. Different texts never have the same result.

    If all characters are ASCII, as in nearly all records, orjson writes the same bytes as the json module, much faster.
    A scheduler writes two such texts for each GPU pod when it starts.
    """
    try:
        fast = orjson.dumps(texts)
    except orjson.JSONEncodeError:  # a text is not valid Unicode
        fast = b""
    return fast if fast and fast.isascii() else _CANONICAL.encode(texts).encode()
