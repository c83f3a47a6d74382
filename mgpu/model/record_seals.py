"""Seals: signatures that prove that mgpu decided an allocation record.

The scheduler signs what it decides with Ed25519 and writes the signature beside the record, in the same write. A seal
holds for one object on one node with exactly these annotations: on another pod, on a pod that was created again under
the same name, or beside a changed, added or removed annotation it does not verify.
"""

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SEAL = "mgpu.io/seal"
"""The annotation that authenticates the placement annotations of its pod: `v1.<key id>.<subject's uid>.<signature>`."""

_DOMAIN = "mgpu-record-v1"
"""Begins everything that is signed, so that a signature for another purpose never counts for a record."""
_FORM = re.compile(
    r"v1\.(?P<key>[0-9a-f]{16})\.(?P<subject>[0-9A-Za-z-]{1,128})\.(?P<signature>[0-9a-f]{128})", re.ASCII
)


class Subject(NamedTuple):
    """What a record is about: the object that it was decided for, its pod and its node."""

    uid: str
    namespace: str
    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal as an annotation holds it.

    Attributes:
        key: the id of the key (`key_id`).
        subject: the uid of the object that it was made for.
        signature: in hexadecimal digits.
    """

    key: str
    subject: str
    signature: str

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the seal in a text, or None for a text of another form."""
        match = _FORM.fullmatch(text)
        return cls(match["key"], match["subject"], match["signature"]) if match else None

    def __str__(self) -> str:
        return f"v1.{self.key}.{self.subject}.{self.signature}"


@dataclass(frozen=True)
class Signer:
    """Signs records with the private key of the scheduler."""

    key: Ed25519PrivateKey

    @cached_property
    def id(self) -> str:
        return key_id(self.key.public_key())

    def sign(self, subject: Subject, record: Mapping[str, str]) -> Seal:
        return Seal(self.id, subject.uid, self.key.sign(_content(subject, record)).hex())


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys whose seals count.

    Attributes:
        since: when sealing came into force, in the API server's format of times.
        public: by key id.
        signer: the private key of one of them; only the scheduler has it.
    """

    since: str
    public: Mapping[str, Ed25519PublicKey]
    signer: Signer | None = None

    def names_known_key(self, text: str) -> bool:
        """Return whether this is a seal that names one of the keys, valid or not."""
        seal = Seal.read(text)
        return seal is not None and seal.key in self.public

    def refusal_reason(self, subject: Subject, record: Mapping[str, str], text: str) -> str | None:
        """Return why a seal does not authenticate a record of a subject, or None where it does."""
        seal = Seal.read(text)
        if seal is None:
            return "it has not the form of a seal"
        if seal.subject != subject.uid:
            return f"it was made for the object with uid {seal.subject}"
        if self.signer is not None and seal.key == self.signer.id:
            # Ed25519 is deterministic. A process that can sign compares signatures, in a third of the time of
            # verifying.
            mine = self.signer.sign(subject, record)
            return None if hmac.compare_digest(mine.signature, seal.signature) else _UNLIKE
        public = self.public.get(seal.key)
        if public is None:
            return f"no key with the id {seal.key} is known here"
        try:
            public.verify(bytes.fromhex(seal.signature), _content(subject, record))
        except InvalidSignature:
            return _UNLIKE
        return None


_UNLIKE = "it was made for another record, pod, or node, or the record has been changed"


def key_id(key: Ed25519PublicKey) -> str:
    """Return the id of a key in seals: the first 16 hexadecimal digits of the SHA-256 of its 32 bytes."""
    return sha256(key.public_bytes_raw()).hexdigest()[:16]


def _content(subject: Subject, record: Mapping[str, str]) -> bytes:
    """Return what is signed, in a canonical form: JSON text in ASCII, the annotations in the order of their keys."""
    return json.dumps([_DOMAIN, *subject, sorted(record.items())], separators=(",", ":")).encode()
