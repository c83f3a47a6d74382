"""A kubeconfig for kubectl and the Kubernetes clients."""

import base64
from pathlib import Path

import yaml


def write_kubeconfig(path: Path, url: str, ca: bytes | None, token: str, *, name: str = "mgpu-playground") -> None:
    """`ca` is the PEM that signed the server's certificate; None for plain HTTP."""
    cluster = {"server": url} | ({"certificate-authority-data": base64.b64encode(ca).decode()} if ca else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
