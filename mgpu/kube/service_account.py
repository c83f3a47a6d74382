"""The API server of the cluster that this process runs in, with the credentials of the pod's service account.

The kubernetes package has the same function, `load_incluster_config`. It is not used, because importing the package
costs each process 60 ms of CPU and 8 MiB, mostly for OAuth and WebSockets, and the function reads two variables and two
files (docs/performance.md). Proxies are not considered: a pod reaches the Service of the API server directly.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import urllib3

from mgpu.kube.server import NoCredentials
from mgpu.model.errors import BadObject, Problem

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts the token and the CA."""
_TOKEN_SECONDS = 60.0
"""How long a token is used before its file is read again. The kubelet replaces a token long before it expires."""


class _Token(NamedTuple):
    text: str
    until: float
    """The time of the clock at which the file is read again."""


class ServiceAccount:
    """A `Server`.

    Args:
        environ: the environment, which the kubelet sets.
        folder: the folder with the files `token` and `ca.crt`.
        clock: returns seconds.

    Raises:
        BadObject: this process does not run in a pod, or the pod has no service account.
    """

    def __init__(
        self, environ: Mapping[str, str], folder: Path = FOLDER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        port = environ.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port:
            raise _bad("there is none, and KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set")
        self._url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._authority = folder / "ca.crt"
        self._file = folder / "token"
        self._clock = clock
        try:
            if not self._authority.read_bytes():
                raise _bad(f"{self._authority} is empty")
            self._token = self._read()
        except (OSError, NoCredentials) as error:
            raise _bad(str(error)) from error

    @property
    def url(self) -> str:
        return self._url

    def make_pool(self, **options: Any) -> urllib3.PoolManager:
        return urllib3.PoolManager(cert_reqs="CERT_REQUIRED", ca_certs=str(self._authority), **options)

    def credentials(self) -> Mapping[str, str]:
        found = self._token
        if self._clock() > found.until:
            # Two threads may read the file at the same time, which is harmless.
            found = self._token = self._read()
        return {"Authorization": f"Bearer {found.text}"}

    def _read(self) -> _Token:
        token = self._file.read_text(encoding="ascii", errors="replace").strip()
        if not token:
            raise NoCredentials(f"{self._file} is empty")
        if not (token.isascii() and token.isprintable()):
            raise NoCredentials(f"{self._file} has no token")
        return _Token(token, self._clock() + _TOKEN_SECONDS)


def _bad(text: str) -> BadObject:
    return BadObject([Problem("kubeconfig", text)])
