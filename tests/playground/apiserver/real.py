"""A real etcd and kube-apiserver on loopback, from the directory that KUBEBUILDER_ASSETS names, as in envtest."""

import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from playground.apiserver import self_signed

# What the contract does not cover: service account tokens, taints on fresh nodes, owners' permissions.
_DISABLED = "ServiceAccount,TaintNodesByCondition,OwnerReferencesPermissionEnforcement"
_START_SECONDS = 90


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _process(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                child.kill()


def _wait_ready(url: str, ca: str, token: str, child: subprocess.Popen[bytes], log: Path) -> None:
    context = ssl.create_default_context(cafile=ca)
    request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {token}"})
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with urllib.request.urlopen(request, context=context, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"kube-apiserver did not become ready; the end of its log:\n{log.read_text()[-3000:]}")


def _write_service_account_key(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    plain, form = serialization.NoEncryption(), serialization.PrivateFormat.TraditionalOpenSSL
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


@contextmanager
def real_api_server(assets: Path, folder: Path, tokens: dict[str, tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """(URL, path of the CA) of a real API server. `tokens`: token → (user name, group)."""
    certificate, key = self_signed(folder)
    _write_service_account_key(folder / "sa.key")
    lines = [f'{token},{name},{i},"{group}"' for i, (token, (name, group)) in enumerate(sorted(tokens.items()))]
    (folder / "tokens.csv").write_text("\n".join(lines) + "\n")
    client, peer, port = _free_port(), _free_port(), _free_port()
    etcd_url, peer_url, url = (f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}", f"https://127.0.0.1:{port}")
    with ExitStack() as stack:
        stack.enter_context(
            _process(
                folder / "etcd.log", str(assets / "etcd"), f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync",
                f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}",
                f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}",
                f"--initial-cluster=default={peer_url}",
            )
        )  # fmt: skip
        log = folder / "apiserver.log"
        api = stack.enter_context(
            _process(
                log, str(assets / "kube-apiserver"), "--bind-address=127.0.0.1", f"--secure-port={port}",
                f"--etcd-servers={etcd_url}", f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}",
                f"--cert-dir={folder}", f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=AlwaysAllow", "--service-cluster-ip-range=10.0.0.0/24",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder / 'sa.key'}",
                f"--service-account-signing-key-file={folder / 'sa.key'}",
                f"--disable-admission-plugins={_DISABLED}", "--allow-privileged=true", "--profiling=false",
                "--endpoint-reconciler-type=none",
            )
        )  # fmt: skip
        _wait_ready(url, certificate, min(tokens), api, log)
        yield url, Path(certificate)
