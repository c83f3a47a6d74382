"""Stores certificates in a directory that the process writes, or finds them in a mounted one that it only reads.

The mounted directory can be, for example, a Secret of cert-manager. `mgpu.cli.certificate` chooses between
the two, `certificate_renewer` writes certificates, and `webhook.main` creates a private directory for its metrics.
"""

import fcntl
import hashlib
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mgpu.model.errors import BadObject, Problem
from mgpu.serving.certificates import CA, CA_KEY, CHAIN, KEY, Files

_NAMES = (CA, CA_KEY, CHAIN, KEY)


class CertificateFolder:
    """A `certificates.Store` in a directory, which is created when it is first read or written.

    A lock on a file in the directory guards `read` and `write`, so several processes can use the directory at the same
    time. `tls_context` reads the files without the lock, and may find the new certificate with the old key for a
    moment, which it must tolerate.

    Attributes:
        chain: the path of the serving certificate.
        key: the path of its key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chain, self.key = path / CHAIN, path / KEY

    def read(self) -> tuple[Files, str]:
        with self._locked():
            return self._read()

    def write(self, files: Files, version: str) -> bool:
        with self._locked():
            if self._read()[1] != version:
                return False
            for name in _NAMES:
                self._replace(name, files[name])
            return True

    def put(self, files: Files) -> None:
        """Store these files, whatever the directory contains."""
        while True:
            current, version = self.read()
            if current == files or self.write(files, version):
                return

    def _read(self) -> tuple[Files, str]:
        files = {name: (self.path / name).read_bytes() for name in _NAMES if (self.path / name).is_file()}
        return files, hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()

    def _replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically. Only the owner may read it."""
        temporary = self.path / f".{name}.new"
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def create_private_folder(stack: ExitStack, prefix: str) -> str:
    """Create a private temporary directory and register its removal with `stack`.

    Only this process removes the directory. Forked workers unwind the same stack when they end, while other workers
    still use the directory.
    """
    folder = tempfile.mkdtemp(prefix=prefix)
    owner = os.getpid()
    stack.callback(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def find_mounted_certificate(path: Path) -> tuple[Path, Path]:
    """Return the paths of the certificate chain and of the key in a mounted directory.

    Raises BadObject if a file cannot be read, or if the files are not a valid certificate and its key.
    """
    chain, key = path / CHAIN, path / KEY
    for file in (chain, key):
        if not os.access(file, os.R_OK):
            raise BadObject([Problem(str(file), "does not exist or cannot be read")])
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    except ssl.SSLError as error:
        text = f"{CHAIN} and {KEY} are not a certificate and its key: {error}"
        raise BadObject([Problem(str(path), text)]) from error
    return chain, key
