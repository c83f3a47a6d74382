"""The keys that the playground's records are sealed with, made anew for every cluster."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from mgpu.model.seals import key_id
from mgpu.serving.record_keys import SINCE


def record_keys(folder: Path) -> dict[str, str]:
    """The variables that tell the processes of new keys in `folder`, which is made."""
    public = folder / "public"
    public.mkdir(parents=True)
    key = Ed25519PrivateKey.generate()
    signing = folder / "signing.pem"
    signing.touch(mode=0o600)
    signing.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (public / f"{key_id(key.public_key())}.pem").write_bytes(pem)
    (public / SINCE).write_text(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    return {"MGPU_RECORDS__SIGNINGKEY": str(signing), "MGPU_RECORDS__PUBLICKEYS": str(public)}


def config_map(variables: Mapping[str, str]) -> dict[str, Any]:
    """The public keys as an installation has them, where `mgpu doctor` looks for them."""
    folder = Path(variables["MGPU_RECORDS__PUBLICKEYS"])
    data = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mgpu-record-keys"}, "data": data}
