"""Creating, renewing, repairing and sharing certificates."""

import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mgpu.model.errors import BadObject, RetryLater
from mgpu.serving.certificate_folder import CertificateFolder, find_mounted_certificate
from mgpu.serving.certificates import (
    CA,
    CA_KEY,
    CA_LIFETIME,
    CHAIN,
    KEY,
    LIFETIME,
    Authority,
    Files,
    certificate_expiry,
    create_authority,
    ensure_certificate,
    renew_if_due,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = {"mgpu-webhook.mgpu-system.svc", "127.0.0.1"}
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def files() -> Files:
    return renew_if_due({}, NAMES, NOW)


def authorities(files: Files) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(files[CA])


def trusted(files: Files) -> bool:
    """Return whether a CA of the bundle has signed the serving certificate."""
    chain = x509.load_pem_x509_certificate(files[CHAIN])
    for authority in authorities(files):
        with suppress(ValueError, InvalidSignature):
            chain.verify_directly_issued_by(authority)
            return True
    return False


def test_new_certificate_has_the_names_and_is_signed_by_its_ca(files: Files) -> None:
    certificate = x509.load_pem_x509_certificate(files[CHAIN])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"mgpu-webhook.mgpu-system.svc"}
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert trusted(files)
    assert certificate_expiry(files) == NOW + LIFETIME


def test_leaf_names_the_key_of_its_ca_as_the_ca_does(files: Files) -> None:
    key = load_pem_private_key(files[CA_KEY], None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    other = x509.SubjectKeyIdentifier(b"not the SHA-1 of the key")  # as that of Helm's genCA
    (given,) = authorities(files)
    ca = (
        x509.CertificateBuilder(given.subject, given.subject, key.public_key(), 7)
        .not_valid_before(NOW)
        .not_valid_after(NOW + CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(other, critical=False)
        .sign(key, hashes.SHA256())
    )
    new = renew_if_due({CA: ca.public_bytes(Encoding.PEM), CA_KEY: files[CA_KEY]}, NAMES, NOW, Authority.GIVEN)
    leaf = x509.load_pem_x509_certificate(new[CHAIN])
    named = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert named.key_identifier == other.digest
    assert renew_if_due(new, NAMES, NOW, Authority.GIVEN) is new


@pytest.mark.parametrize("after", [timedelta(0), LIFETIME / 2])
def test_valid_certificate_is_not_renewed(files: Files, after: timedelta) -> None:
    assert renew_if_due(files, NAMES, NOW + after) is files


def test_address_in_another_notation_needs_no_new_certificate() -> None:
    files = renew_if_due({}, {"2001:DB8:0::1"}, NOW)
    assert renew_if_due(files, {"2001:DB8:0::1"}, NOW) is files
    assert renew_if_due(files, {"2001:db8::1"}, NOW) is files


def test_certificate_is_renewed_under_the_same_ca(files: Files) -> None:
    later = NOW + LIFETIME * 0.67
    new = renew_if_due(files, NAMES, later)
    assert certificate_expiry(new) == later + LIFETIME
    assert new[CA] == files[CA]
    assert trusted(new)


def test_additional_name_needs_a_new_certificate(files: Files) -> None:
    new = renew_if_due(files, {*NAMES, "host.example"}, NOW + DAY)
    assert new[CHAIN] != files[CHAIN]
    assert new[CA] == files[CA]
    assert renew_if_due(new, NAMES, NOW + DAY) is new


def test_new_ca_is_in_the_bundle_before_it_signs(files: Files) -> None:
    later = NOW + CA_LIFETIME * 0.67
    running = renew_if_due(files, NAMES, later - LIFETIME * 0.3)
    first = renew_if_due(running, NAMES, later)
    assert len(authorities(first)) == 2
    assert first[CHAIN] == running[CHAIN]
    second = renew_if_due(first, NAMES, later + LIFETIME)
    assert second[CA] == first[CA]
    assert x509.load_pem_x509_certificate(second[CHAIN]).issuer == authorities(second)[0].subject


def test_expired_ca_is_removed_from_the_bundle(files: Files) -> None:
    later = NOW + CA_LIFETIME * 0.67
    both = renew_if_due(renew_if_due(files, NAMES, later), NAMES, later + LIFETIME)
    assert len(authorities(both)) == 2
    ended = renew_if_due(both, NAMES, NOW + CA_LIFETIME + DAY)
    assert len(authorities(ended)) == 1
    assert trusted(ended)


BROKEN: Mapping[str, Mapping[str, bytes | None]] = {
    "no serving key": {KEY: None},
    "half a serving key": {KEY: b"-----BEGIN PRIVATE KEY-----\nMIGH"},
    "an empty certificate": {CHAIN: b""},
    "no authority": {CA: None},
    "no authority's key": {CA_KEY: None},
    "noise": {CA: b"\x00\xff", CA_KEY: b"\x00", CHAIN: b"\x00", KEY: b"\x00"},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_damaged_files_are_replaced(files: Files, broken: Mapping[str, bytes | None]) -> None:
    torn = {k: v for k, v in {**files, **broken}.items() if v is not None}
    new = renew_if_due(torn, NAMES, NOW + DAY)
    assert trusted(new)
    assert renew_if_due(new, NAMES, NOW + DAY) is new


def leaf(
    files: Files,
    first: datetime = NOW - timedelta(hours=1),
    life: timedelta = LIFETIME,
    curve: ec.EllipticCurve | None = None,
    usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.SERVER_AUTH,
    extension: x509.ObjectIdentifier | None = None,
    more_names: Sequence[x509.GeneralName] = (),
    identifier: bytes = b"",
) -> Files:
    """Return the files with another leaf that the same CA has signed, as an attacker with its key could."""
    authority, authority_key = authorities(files)[0], load_pem_private_key(files[CA_KEY], None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(curve or ec.SECP256R1())
    names = [x509.DNSName("mgpu-webhook.mgpu-system.svc"), x509.IPAddress(ip_address("127.0.0.1")), *more_names]
    of_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        x509.CertificateBuilder(authority.subject, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mgpu")]))
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(first)
        .not_valid_after(first + life)
        .add_extension(x509.SubjectKeyIdentifier(identifier) if identifier else of_key, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(of_issuer, critical=False)
    )
    if extension:
        builder = builder.add_extension(x509.UnrecognizedExtension(extension, b"\x05\x00"), critical=True)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return {**files, CHAIN: builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM), KEY: pem}


@pytest.mark.parametrize("file", [CA_KEY, KEY])
def test_key_above_the_limit_is_not_parsed(files: Files, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an RSA key of 16,384 bits took ten seconds, in which no thread of the process ran."""
    long = b"-----BEGIN PRIVATE KEY-----\n" + 2000 * b"M"

    def loaded(pem: bytes, password: None) -> Any:
        assert pem != long
        return load_pem_private_key(pem, password)

    monkeypatch.setattr("mgpu.serving.certificates.load_pem_private_key", loaded)
    new = renew_if_due({**files, file: long}, NAMES, NOW)
    assert new[file] != long
    assert trusted(new)


def test_leaf_of_the_expected_form_is_not_replaced(files: Files) -> None:
    theirs = leaf(files)
    assert renew_if_due(theirs, NAMES, NOW, Authority.GIVEN) is theirs


STRANGE: Mapping[str, Mapping[str, Any]] = {
    "begins in years": {"first": NOW + 365 * DAY},
    "ends in years": {"life": 730 * DAY},
    "is on a curve that OpenSSL does not load": {"curve": ec.SECP192R1()},
    "is too large by its names": {"more_names": [x509.DNSName(f"n{i}") for i in range(1000)]},
    "has an address of eight bytes": {"more_names": [x509.IPAddress(ip_network("10.0.0.0/8"))]},
    "has a name that is none": {"more_names": [x509.DNSName("a b")]},
    "names another key": {"identifier": b"x"},
    "is for clients": {"usage": ExtendedKeyUsageOID.CLIENT_AUTH},
    "has a critical extension that nobody knows": {"extension": x509.ObjectIdentifier("1.2.3.4.5")},
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_leaf_of_another_form_is_replaced(files: Files, change: Mapping[str, Any]) -> None:
    theirs = leaf(files, **change)
    new = renew_if_due(theirs, NAMES, NOW, Authority.GIVEN)
    assert new[CHAIN] != theirs[CHAIN]
    assert new[CA] == files[CA]
    assert trusted(new)


def test_certificate_of_another_ca_is_replaced(files: Files) -> None:
    other = renew_if_due({}, NAMES, NOW)
    new = renew_if_due({**files, CHAIN: other[CHAIN], KEY: other[KEY]}, NAMES, NOW)
    assert new[CA] == files[CA]
    assert trusted(new)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a..b", "ä.example", "a" * 64, "http://x"])
def test_invalid_name_is_an_error(name: str) -> None:
    with pytest.raises(BadObject, match="neither a DNS name nor an IP address"):
        renew_if_due({}, {name}, NOW)


def test_folder_stores_files_that_only_the_owner_may_read(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path / "new" / "certs")
    files = ensure_certificate(folder, NAMES, NOW)
    assert folder.read()[0] == files
    assert {
        p.name: p.stat().st_mode & 0o777 for p in folder.path.glob("*.*") if p.suffix in (".key", ".crt")
    } == dict.fromkeys((CA, CA_KEY, CHAIN, KEY), 384)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.chain, folder.key)


def test_folder_with_an_incomplete_write_is_repaired(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    ensure_certificate(folder, NAMES, NOW)
    (tmp_path / ".tls.key.new").write_bytes(b"half")
    folder.key.write_bytes(b"-----BEGIN")
    assert trusted(ensure_certificate(folder, NAMES, NOW))
    assert find_mounted_certificate(tmp_path) == (folder.chain, folder.key)


def test_concurrent_processes_use_one_certificate(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: ensure_certificate(CertificateFolder(tmp_path), NAMES, NOW), range(8)))
    assert len({files[CHAIN] for files in made}) == 1
    assert made[0] == CertificateFolder(tmp_path).read()[0]


class Contested:
    """A store in which another process always writes first."""

    def read(self) -> tuple[Files, str]:
        return {}, "1"

    def write(self, files: Files, version: str) -> bool:  # noqa: ARG002
        return False


def test_store_that_always_changes_is_retry_later() -> None:
    with pytest.raises(RetryLater):
        ensure_certificate(Contested(), NAMES, NOW)


def test_mounted_certificate_must_exist_and_fit_its_key(tmp_path: Path, files: Files) -> None:
    with pytest.raises(BadObject, match=r"tls\.crt"):
        find_mounted_certificate(tmp_path)
    (tmp_path / CHAIN).write_bytes(files[CHAIN])
    (tmp_path / KEY).write_bytes(renew_if_due({}, NAMES, NOW)[KEY])
    with pytest.raises(BadObject, match="are not a certificate and its key"):
        find_mounted_certificate(tmp_path)
    (tmp_path / KEY).write_bytes(files[KEY])
    assert find_mounted_certificate(tmp_path) == (tmp_path / CHAIN, tmp_path / KEY)


def test_encoding_of_the_ca_of_the_installation_is_not_changed() -> None:
    """openssl encodes keys differently, and an admission policy denies a change of the CA in the Secret."""
    made = create_authority(NOW)
    key = load_pem_private_key(made[CA_KEY], None)
    own_form = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    given_by_openssl = {**made, CA: b"# a comment\n" + made[CA], CA_KEY: own_form, "more": b"x"}
    files = renew_if_due(given_by_openssl, NAMES, NOW + DAY, Authority.GIVEN)
    assert {name: files[name] for name in given_by_openssl} == given_by_openssl
    assert certificate_expiry(files) == NOW + DAY + LIFETIME
    assert renew_if_due(files, NAMES, NOW + DAY, Authority.GIVEN) is files
