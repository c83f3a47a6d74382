"""Reads the keys that seal and verify allocation records, from files that the settings name (docs/security.md).

A key that cannot be read must be an error, because without keys every record would count. The scheduler, the agents and
`mgpu doctor` read the keys. Only the functions that read a key import cryptography, because it takes 7 MiB, and agents
without keys need none of it.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.errors import BadObject, Problem
from mgpu.model.record_seals import Keys, Signer, key_id
from mgpu.settings import Settings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_log = logging.getLogger(__name__)

SINCE = "since"
"""The name of the file with the time from which on records must be sealed. It is next to the public keys."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_SIGNING, _PUBLIC = "records.signingKey", "records.publicKeys"


def make_record_verifier(settings: Settings, *, signing: bool) -> RecordVerifier:
    """Return the verifier of records. It verifies no seals if `records.publicKeys` is empty.

    Args:
        signing: whether the process also seals records, as the scheduler does. It then needs the private key.

    Raises:
        BadObject: if a key or the file `since` cannot be read, if no public key belongs to the private key, or if only
            the private key is set.
    """
    own = settings.records
    peers: frozenset[str] = frozenset(own.peers)
    if not own.public_keys:
        if signing and own.signing_key:
            raise _bad(_PUBLIC, f"must be set if {_SIGNING} is set; otherwise no process could verify the seals")
        return RecordVerifier(None, peers)
    folder = Path(own.public_keys)
    public = {key_id(key): key for key in _public_keys(folder)}
    signer = _signer(Path(own.signing_key)) if signing else None
    if signer is not None and signer.id not in public:
        text = f"{own.signing_key} has the id {signer.id}, which no key in {folder} has; add its public key"
        raise _bad(_SIGNING, text)
    return RecordVerifier(Keys(_since(folder / SINCE), public, signer), peers)


def warn_if_unsealed(records: RecordVerifier) -> None:
    """Log a warning if no seals are verified. In that case every record that admission allowed counts."""
    if records.keys is None:
        text = "records are not sealed (records.publicKeys is empty): a record counts if admission allowed it"
        _log.warning('%s; see docs/security.md, "Records"', text)


def read_public_keys(path: str, texts: Mapping[str, str]) -> Keys:
    """Return the public keys in the `data` of a ConfigMap.

    Args:
        path: the name of the ConfigMap, for messages.
    Raises:
        BadObject: if a key or the time is not valid.
    """
    files = [(name, text) for name, text in sorted(texts.items()) if name.endswith(".pem")]
    keys = [_public_key(f"{path}[{name}]", text.encode()) for name, text in files]
    return Keys(_time(f"{path}[{SINCE}]", texts.get(SINCE, "").strip()), {key_id(key): key for key in keys})


def _public_keys(folder: Path) -> Iterator["Ed25519PublicKey"]:
    files = sorted(folder.glob("*.pem"))
    if not files:
        raise _bad(_PUBLIC, f"{folder} has no file *.pem; it must have the public key of {_SIGNING}")
    for file in files:
        yield _public_key(f"{_PUBLIC}: {file}", _read(_PUBLIC, file))


def _public_key(path: str, pem: bytes) -> "Ed25519PublicKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _bad(path, "is not a public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _bad(path, "must be an Ed25519 key; create one with openssl genpkey -algorithm ed25519")
    return key


def _signer(file: Path) -> Signer:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(_SIGNING, file), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _bad(_SIGNING, f"{file} is not a private key in PEM without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _bad(_SIGNING, f"{file} must be an Ed25519 key; create one with openssl genpkey -algorithm ed25519")
    return Signer(key)


def _since(file: Path) -> str:
    return _time(f"{_PUBLIC}: {file}", _read(_PUBLIC, file).decode("ascii", "replace").strip())


def _time(path: str, text: str) -> str:
    if not _TIME.fullmatch(text):
        raise _bad(path, f"must be a time such as 2026-01-31T12:00:00Z, not {text[:40]!r}")
    return text


def _read(setting: str, file: Path) -> bytes:
    if file == Path():
        raise _bad(setting, "must be set if records.publicKeys is")
    try:
        return file.read_bytes()
    except OSError as error:
        raise _bad(setting, f"{file} cannot be read: {error.strerror}") from error


def _bad(path: str, text: str) -> BadObject:
    return BadObject([Problem(path, text)])
