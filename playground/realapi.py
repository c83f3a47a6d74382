"""Runs a real etcd and a real kube-apiserver on loopback.

The programs come from a directory that envtest has downloaded. If the environment variable KUBEBUILDER_ASSETS names
such a directory, `cluster` and some tests run them in place of the playground's API server. KUBE_FEATURE_GATES has the
feature gates of all programs of Kubernetes, such as `DRAConsumableCapacity=true,DRADeviceTaints=true`, and
KUBE_RUNTIME_CONFIG the APIs that kube-apiserver serves or not, such as `resource.k8s.io/v1alpha3=true`.
"""

import json
import os
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from playground.apiserver import Request, User, self_signed
from playground.processes import Process, free_port

FEATURE_GATES = "KUBE_FEATURE_GATES"
RUNTIME_CONFIG = "KUBE_RUNTIME_CONFIG"
_START_SECONDS = 90.0
_AUDIT = "audit.log"
# kube-controller-manager does not run here, so no service accounts are created, and no taint of a new node is removed.
_DISABLED = "ServiceAccount,TaintNodesByCondition"


@contextmanager
def real_api_server(
    assets: Path, folder: Path, tokens: Mapping[str, User], restricted: Collection[str] = ()
) -> Iterator[tuple[str, Path]]:
    """Run a real API server inside the context. The value of the context is the URL and the file of the CA.

    Raises StartError if the API server is not ready after 90 seconds.

    Args:
        assets: The directory of the programs.
        folder: An existing directory for data and logs.
        tokens: The users by their tokens. Users who are not in `restricted` may do everything.
        restricted: The names of the users to whom RBAC applies. `requests_in(folder)` returns their requests.
    """
    certificate, key = self_signed(folder)
    account_key = folder / "service-accounts.key"
    _write_key(account_key)
    _write_tokens(folder / "tokens.csv", tokens, restricted)
    etcd_url, peer_url, url = (f"{s}://127.0.0.1:{free_port()}" for s in ("http", "http", "https"))
    etcd = {
        "data-dir": folder / "etcd",
        "listen-client-urls": etcd_url,
        "advertise-client-urls": etcd_url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"default={peer_url}",
        "unsafe-no-fsync": "true",
    }
    api = {
        "bind-address": "127.0.0.1",
        "secure-port": url.rpartition(":")[2],
        "etcd-servers": etcd_url,
        "tls-cert-file": certificate,
        "tls-private-key-file": key,
        "cert-dir": folder,
        "token-auth-file": folder / "tokens.csv",
        "authorization-mode": "RBAC" if restricted else "AlwaysAllow",
        "service-cluster-ip-range": "10.0.0.0/24",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": account_key,
        "service-account-signing-key-file": account_key,
        "disable-admission-plugins": _DISABLED,
        "allow-privileged": "true",
        "endpoint-reconciler-type": "none",
        "kubelet-preferred-address-types": "InternalIP",
        **(_audit(folder, restricted) if restricted else {}),
        **feature_gates(),
        **_flag("runtime-config", RUNTIME_CONFIG),
    }
    with ExitStack() as stack:
        for name, flags in (("etcd", etcd), ("kube-apiserver", api)):
            command = [str(assets / name), *(f"--{flag}={value}" for flag, value in flags.items())]
            # If this process is killed, both programs get SIGKILL and end at once. After SIGTERM a kube-apiserver
            # without etcd would continue for a minute.
            process = Process(name, command, folder / f"{name}.log", os.environ, signal.SIGKILL)
            process.start()
            stack.callback(process.stop)
        process.wait("ready", lambda: _ready(url, certificate, min(tokens)), _START_SECONDS)
        yield url, Path(certificate)


def feature_gates() -> dict[str, str]:
    """Return the flag for the feature gates that the environment names, or nothing if it names none."""
    return _flag("feature-gates", FEATURE_GATES)


def _flag(name: str, variable: str) -> dict[str, str]:
    value = os.environ.get(variable, "")
    return {name: value} if value else {}


def requests_in(folder: Path) -> frozenset[Request]:
    """Return the requests of the restricted users, from the audit log of the API server of this folder."""
    text = (folder / _AUDIT).read_text() if (folder / _AUDIT).exists() else ""
    lines = text.rpartition("\n")[0].splitlines()  # the last line may be incomplete
    events = (event for line in lines if "objectRef" in (event := json.loads(line)))
    return frozenset(map(_request, events))


def _request(event: Mapping[str, Any]) -> Request:
    of = event["objectRef"]
    resource = "/".join(filter(None, (of["resource"], of.get("subresource"))))
    allowed = event.get("annotations", {}).get("authorization.k8s.io/decision") == "allow"
    where = (of.get("namespace", ""), "" if allowed else of.get("name", ""))
    return Request(event["user"]["username"], event["verb"], of.get("apiGroup", ""), resource, *where, allowed)


def _audit(folder: Path, users: Collection[str]) -> dict[str, object]:
    """Write the audit policy, and return the flags for an audit log of the requests of these users.

    The log also has the watches that have not ended.
    """
    policy = folder / "audit.yaml"
    rules = [{"level": "Metadata", "users": sorted(users)}]
    head = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
    policy.write_text(json.dumps({**head, "rules": [*rules, {"level": "None"}]}))
    return {"audit-policy-file": policy, "audit-log-path": folder / _AUDIT}


def _ready(url: str, ca: str, token: str) -> bool:
    request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ca), timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _write_tokens(path: Path, tokens: Mapping[str, User], restricted: Collection[str]) -> None:
    """Write the token file. If RBAC is on, users who are not restricted become cluster administrators."""
    rows = []
    for i, (token, user) in enumerate(tokens.items()):
        masters = {"system:masters"} if restricted and user.name not in restricted else set()
        rows.append(f'{token},{user.name},{i},"{",".join(sorted({*user.groups, *masters}))}"')
    path.touch(mode=0o600)
    path.write_text("\n".join(rows) + "\n")


def _write_key(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form, plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
