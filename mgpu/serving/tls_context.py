"""Reloads the TLS context of a listening address when its certificate files change.

`mgpu.serving.server` creates a `ReloadingContext` for each listening address with TLS.
"""

import logging
import ssl
import threading
from pathlib import Path

from mgpu.serving.patience import PatientTLS

_log = logging.getLogger(__name__)


class ReloadingContext:
    """Holds the SSLContext (TLS 1.2 or later) of a listening address. `current` reloads it when its files have changed.

    While the files do not fit together, as in the middle of a rotation, the last valid context stays in use. The class
    is thread-safe: `_lock` guards the context and the stamp of its files.

    Args:
        client_ca: the path of a file of CA certificates (PEM). Clients need a certificate that one of these CAs has
            signed. If it is None, clients need no certificate.
    """

    def __init__(self, chain: Path, key: Path, client_ca: Path | None = None) -> None:
        self._chain = chain
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._loaded = self._stamp()
        self._context = self._load()

    def current(self) -> ssl.SSLContext:
        """Return the context, after reloading the files if they have changed."""
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp != self._loaded:
                    self._context = self._load()
                    self._loaded = stamp
                    _log.info("serving certificate reloaded", extra={"file": str(self._chain)})
            except (OSError, ssl.SSLError) as error:
                _log.warning("serving certificate not reloaded: %s", error, extra={"file": str(self._chain)})
            return self._context

    def _stamp(self) -> tuple[int, ...]:
        """Return the modification times and inodes of the files, which change when a file is replaced."""
        files = (self._chain, self._key, *([self._client_ca] if self._client_ca else []))
        stats = [file.stat() for file in files]
        return tuple(value for stat in stats for value in (stat.st_mtime_ns, stat.st_ino))

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL 3 refuses renegotiation by clients by default. The option makes other versions refuse it too. Early
        # data (0-RTT) need not be disabled, because Python's ssl module does not support it.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.sslsocket_class = PatientTLS
        context.load_cert_chain(self._chain, self._key)
        if self._client_ca:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
