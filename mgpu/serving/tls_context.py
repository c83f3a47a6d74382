"""Keeps the TLS context of a listening address in step with its certificate files."""

import logging
import ssl
import threading
from pathlib import Path

from mgpu.serving.patience import PatientTLS

_log = logging.getLogger(__name__)


class ReloadingContext:
    """An SSLContext (TLS 1.2 or later) that reloads its files when they change. Thread-safe.

    Files that do not fit together, as in the middle of a rotation, leave the last good context in place.


    client_ca: a file of certificates, one of which must have signed the client's.
    """

    def __init__(self, chain: Path, key: Path, client_ca: Path | None = None) -> None:
        self._chain, self._key, self._client_ca = chain, key, client_ca
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._context = self._load()

    def current(self) -> ssl.SSLContext:
        with self._lock:
            try:
                seen = self._stamp()
                if seen != self._seen:
                    self._context = self._load()
                    self._seen = seen
                    _log.info("serving certificate reloaded", extra={"file": str(self._chain)})
            except (OSError, ssl.SSLError) as error:
                _log.warning("serving certificate not reloaded: %s", error, extra={"file": str(self._chain)})
            return self._context

    def _stamp(self) -> tuple[int, ...]:
        files = (self._chain, self._key, *([self._client_ca] if self._client_ca else []))
        return tuple(v for f in files for s in (f.stat(),) for v in (s.st_mtime_ns, s.st_ino))

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL refuses renegotiation by clients by default, and Python's ssl module has no early data (0-RTT).
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.sslsocket_class = PatientTLS
        context.load_cert_chain(self._chain, self._key)
        if self._client_ca:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
