"""Creates and renews serving certificates, and the CAs that sign them.

Mainly `mgpu.serving.certificate_renewer` and the playground call the functions, and `mgpu doctor` uses the names of the
files. In a cluster the installation creates the CA (manifests/certificates.sh), because a process that may write the CA
bundle of a webhook configuration could also make the configuration name another server. This is `Authority.GIVEN`: the
process creates no CA, and it signs with a new CA at once, since the installation publishes the bundle before it
distributes the CA.

Outside of a cluster (`Authority.OWN`) the process creates the CA too, and a successor after two thirds of its lifetime.
When it creates a successor, it does not renew a valid serving certificate yet, and the old CA stays in the bundle until
it expires. So clients trust the new CA before they are shown a certificate that it signed.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mgpu.model.errors import BadObject, Problem, RetryLater

CA_LIFETIME = timedelta(days=730)
LIFETIME = timedelta(days=90)
_BACKDATED = timedelta(hours=1)  # A new certificate is valid since one hour ago, for clients whose clocks are slow.
_ATTEMPTS = 5
"""How often `ensure_certificate` tries. An attempt fails if another process changes the files during it."""
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*", re.ASCII | re.IGNORECASE)
CA, CA_KEY, CHAIN, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
_SUBJECT = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mgpu")])
_MOST_LEAF_BYTES = 4096
"""The most bytes of a leaf (a serving certificate) in DER. Leaves of mgpu have about 500 bytes. Clients reject large
leaves, because they read handshake messages of limited length only."""
_MOST_KEY_BYTES = 1024
"""The most bytes of a key in PEM. Keys of mgpu have 241 bytes. OpenSSL would check the primes of an RSA key of 65,536
bits for minutes."""
_MOST_BUNDLE_BYTES = 65_536
"""The most bytes of a file of certificates in PEM. One CA has about 600 bytes."""
_SERIAL_BITS = 160
_ANY_KEY = ec.generate_private_key(ec.SECP256R1())
"""A key for leaves that are rebuilt only for a comparison (`_is_ours`). The comparison ignores the signature, and the
key of the CA may be unknown."""

Files = Mapping[str, bytes]
"""The content of the files `CA`, `CA_KEY`, `CHAIN` and `KEY`, by name."""


class Authority(Enum):
    """Who creates the CA: the process (OWN) or the installation (GIVEN)."""

    OWN = auto()
    GIVEN = auto()


class NoAuthority(Exception):
    """The store has no valid CA with its key. Only the installation can provide one."""


class Store(Protocol):
    """The storage of the files: a directory, or a Secret that replicas share."""

    def read(self) -> tuple[Files, str]:
        """Return the files that exist, and their version for `write`."""

    def write(self, files: Files, version: str) -> bool:
        """Replace all files, and return True.

        If another process has written since `read` returned `version`, change nothing and return False.
        """


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate, with its key if it is known."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None = None

    @property
    def due(self) -> datetime:
        """The time at which the successor is due: after two thirds of the lifetime."""
        first, last = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return first + (last - first) * 2 / 3


@dataclass(frozen=True, slots=True)
class Material:
    """The CAs and the serving certificate.

    Attributes:
        authorities: the CAs. The first one, which is the newest, signs.
    """

    authorities: tuple[Pair, ...]
    serving: Pair | None

    def files(self) -> dict[str, bytes]:
        authority, serving = self.authorities[0], self.serving
        if not serving or not serving.key or not authority.key:
            raise ValueError("certificates are incomplete")
        return {
            CA: b"".join(pair.certificate.public_bytes(Encoding.PEM) for pair in self.authorities),
            CA_KEY: _key_pem(authority.key),
            CHAIN: serving.certificate.public_bytes(Encoding.PEM),
            KEY: _key_pem(serving.key),
        }


def ensure_certificate(store: Store, names: Collection[str], now: datetime, by: Authority = Authority.OWN) -> Files:
    """Create or renew what is due, and return the files in `store`.

    If several processes renew at the same time, all return the files of the process that writes first.

    Args:
        names: the DNS names and IP addresses of the certificate.
        by: who creates the CA.

    Raises:
        RetryLater: if other processes have changed the files in every attempt.
        BadObject: if one of the names is not valid.
        NoAuthority: if `by` is GIVEN and the store has no valid CA with its key.
    """
    for _ in range(_ATTEMPTS):
        current, version = store.read()
        files = renew_if_due(current, names, now, by)
        if files == current or store.write(files, version):
            return files
    raise RetryLater("other processes keep changing the serving certificate")


def renew_if_due(current: Files, names: Collection[str], now: datetime, by: Authority = Authority.OWN) -> Files:
    """Return the files that replace `current`; `current` itself if nothing is due.

    The certificate is due if it is missing or invalid, lacks one of `names`, or has reached two thirds of its lifetime.
    If `by` is GIVEN, it is also due if the newest CA has not signed it. If the call creates a successor of the CA, a
    certificate that is still valid is not renewed. Raises BadObject and NoAuthority as `ensure_certificate` does.
    """
    material = _read(current, now)
    authorities, serving = material.authorities, material.serving
    required = {_name(name) for name in names}
    is_valid = serving is not None and _is_ours(serving, authorities, now) and required.issubset(_names(serving))
    can_sign = bool(authorities) and authorities[0].key is not None
    if by is Authority.GIVEN:
        if not can_sign:
            raise NoAuthority("there is no valid CA with its key")
        is_valid = is_valid and serving is not None and _is_signed_by(serving.certificate, authorities[0])
    is_ca_due = by is Authority.OWN and (not can_sign or now >= authorities[0].due)
    if is_ca_due:
        authorities = (_create_authority(now), *authorities)
    if not is_valid or (serving is not None and now >= serving.due and not is_ca_due):
        serving = _create_serving(authorities[0], names, now)
    files = Material(authorities, serving).files()
    if by is Authority.GIVEN:
        # Leave the bytes of the CA as they are: an admission policy allows the process to change only the leaf.
        files = {**current, **{name: files[name] for name in (CHAIN, KEY)}}
    return current if files == dict(current) else files


def certificate_expiry(files: Files) -> datetime:
    return x509.load_pem_x509_certificate(files[CHAIN]).not_valid_after_utc


def authority_expiry(files: Files) -> datetime:
    """Return the time at which the CA that signs expires."""
    return x509.load_pem_x509_certificates(files[CA])[0].not_valid_after_utc


def create_authority(now: datetime) -> dict[str, bytes]:
    """Return the files of a new CA, `CA` and `CA_KEY`, which an installation distributes."""
    authority = _create_authority(now)
    if authority.key is None:
        raise ValueError("a new authority has its key")
    return {CA: authority.certificate.public_bytes(Encoding.PEM), CA_KEY: _key_pem(authority.key)}


def _read(files: Files, now: datetime) -> Material:
    """Return the usable part of the files.

    Damaged files, expired CAs, and a serving certificate that none of the CAs has signed count as missing.
    """
    authorities = [Pair(c) for c in _certificates(files.get(CA, b"")) if c.not_valid_after_utc > now]
    ca_key = _key(files.get(CA_KEY, b""))
    if ca_key:
        # In a bundle that was written by hand, the new CA can be the last one.
        authorities.sort(key=lambda pair: not _is_key_of(ca_key, pair.certificate))
        if authorities and _is_key_of(ca_key, authorities[0].certificate):
            authorities[0] = Pair(authorities[0].certificate, ca_key)
    chain, key = _certificates(files.get(CHAIN, b"")), _key(files.get(KEY, b""))
    if len(chain) != 1 or key is None or not _is_key_of(key, chain[0]):
        return Material(tuple(authorities), None)
    is_trusted = any(_is_signed_by(chain[0], ca) for ca in authorities)
    return Material(tuple(authorities), Pair(chain[0], key) if is_trusted else None)


def _certificates(pem: bytes) -> Sequence[x509.Certificate]:
    if len(pem) > _MOST_BUNDLE_BYTES:
        return ()
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return ()


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    if len(pem) > _MOST_KEY_BYTES:
        return None
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _is_key_of(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bool:
    try:
        return _public_pem(certificate.public_key()) == _public_pem(key.public_key())
    except (ValueError, UnsupportedAlgorithm):
        return False


def _is_signed_by(certificate: x509.Certificate, authority: Pair) -> bool:
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _names(serving: Pair) -> list[x509.GeneralName]:
    try:
        return list(serving.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _is_ours(serving: Pair, authorities: Sequence[Pair], now: datetime) -> bool:
    """Return whether mgpu could have created the leaf, and whether it is valid now.

    The leaf must equal, except for the signature, the leaf that mgpu would build with the same names, times and serial
    number. An attacker with the CA's key could sign and store any leaf: one that becomes valid in years, is too large
    for clients, cannot be read by OpenSSL or the API server, or never expires. Without this check, the process would
    serve such a leaf as long as it is valid.
    """
    leaf, key = serving.certificate, serving.key
    try:
        first, last, names = leaf.not_valid_before_utc, leaf.not_valid_after_utc, _names(serving)
        return (
            key is not None
            and isinstance(key.curve, ec.SECP256R1)
            and first <= now < last <= first + LIFETIME + _BACKDATED
            and 0 < leaf.serial_number < 1 << _SERIAL_BITS
            and len(leaf.public_bytes(Encoding.DER)) <= _MOST_LEAF_BYTES
            and all(_is_valid_name(name) for name in names)
            and any(
                leaf.tbs_certificate_bytes
                == _leaf(authority, key, names, first, last, leaf.serial_number)
                .sign(_ANY_KEY, hashes.SHA256())
                .tbs_certificate_bytes
                for authority in authorities
            )
        )
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension):
        return False


def _is_valid_name(name: x509.GeneralName) -> bool:
    if isinstance(name, x509.DNSName):
        return _DNS_NAME.fullmatch(name.value) is not None
    return isinstance(name, x509.IPAddress) and isinstance(name.value, ipaddress.IPv4Address | ipaddress.IPv6Address)


def _leaf(
    authority: Pair,
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    first: datetime,
    last: datetime,
    serial: int,
) -> x509.CertificateBuilder:
    issuer = authority.certificate.public_key()
    if not isinstance(issuer, ec.EllipticCurvePublicKey):
        raise TypeError("a CA has a key on an elliptic curve")
    return (
        _builder(_SUBJECT, authority.certificate.subject, key, first, last, serial)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_authority_key_identifier(authority.certificate, issuer), critical=False)
    )


def _authority_key_identifier(
    authority: x509.Certificate, key: ec.EllipticCurvePublicKey
) -> x509.AuthorityKeyIdentifier:
    """Return the extension of a leaf that names the key of its CA as the CA itself does.

    OpenSSL finds the CA by it. Programs compute the identifier in different ways: Go, and so Helm's `genCA`, does not
    hash with SHA-1 since 1.25.
    """
    try:
        own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _create_authority(now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"mgpu CA {now.astimezone(UTC):%Y-%m-%d %H:%M:%S}")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, name, key, now - _BACKDATED, now + CA_LIFETIME, x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return Pair(builder.sign(key, hashes.SHA256()), key)


def _create_serving(authority: Pair, names: Collection[str], now: datetime) -> Pair:
    if authority.key is None:
        raise ValueError("an authority without its key cannot sign")
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + LIFETIME, authority.certificate.not_valid_after_utc)
    alternatives = [_name(name) for name in sorted(names)]
    builder = _leaf(authority, key, alternatives, now - _BACKDATED, until, x509.random_serial_number())
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    first: datetime,
    last: datetime,
    serial: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if _DNS_NAME.fullmatch(name) is None:
            raise BadObject([Problem("names", f"{name!r} is neither a DNS name nor an IP address")]) from None
        return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public_pem(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return b""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
