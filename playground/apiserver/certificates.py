"""A certificate for loopback, its own authority, for one run of the playground."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def self_signed(folder: Path, names: tuple[str, ...] = ("localhost",)) -> tuple[str, str]:
    """Paths of a new certificate and key (PEM) in `folder`, for 127.0.0.1 and `names`; valid for a week."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mgpu-playground")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=7))
        .add_extension(x509.SubjectAlternativeName([loopback, *map(x509.DNSName, names)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "apiserver.crt", folder / "apiserver.key"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    key_path.touch(mode=0o600)
    key_path.write_bytes(pem)
    return str(cert_path), str(key_path)
