"""Renews the serving certificate of a process on a thread.

`mgpu.cli.certificate` creates the renewer for the webhook and the scheduler. An error must not end the thread, which
logs the error and tries again. It does not log the same error twice in succession.
"""

import logging
import threading
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import Authority, Files, Store, authority_expiry, certificate_expiry, ensure_certificate

_log = logging.getLogger(__name__)
ROUND_SECONDS = 60.0
"""The pause between two checks of the certificate."""
RETRY_SECONDS = 2.0
"""The pause after an error."""
_CA_WARNING = timedelta(days=60)
"""A warning is logged if the CA expires in less than this time."""


class CertificateRenewer:
    """The thread that renews the certificate in `folder`.

    Args:
        folder: the directory from which the process serves the certificate.
        names: the DNS names and addresses of the certificate.
        store: the store with the installation's CA, which replicas share; None if the process has a CA of its own.
        remedy: the advice at the end of every warning: how the user replaces a CA that is missing or expires soon.
    """

    def __init__(
        self, folder: CertificateFolder, names: Collection[str], store: Store | None = None, remedy: str = ""
    ) -> None:
        self._folder = folder
        self._names = names
        self._store = store
        self._remedy = remedy
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> Files:
        """Renew the certificate if that is due, and return the files.

        If there is a store, the files are copied from it to the folder. Raises the errors of `ensure_certificate` and
        of the store.
        """
        if self._store is None:
            return ensure_certificate(self._folder, self._names, datetime.now(UTC))
        files = ensure_certificate(self._store, self._names, datetime.now(UTC), Authority.GIVEN)
        self._folder.put(files)
        return files

    def start(self) -> None:
        """Start the thread. Call this in the process that serves, because threads do not survive a fork."""
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        if self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        logged: str | None = None
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                files = self.renew()
                warning = self._warning(files)
            except Exception as error:  # noqa: BLE001 (outermost loop of the thread: any error is retried)
                pause = RETRY_SECONDS
                warning = f"Serving certificate not renewed: {error or type(error).__name__}; {self._remedy}"
            else:
                pause = ROUND_SECONDS
                _log.debug(
                    "the serving certificate is current",
                    extra={"expires": certificate_expiry(files).isoformat()},
                )
            if warning and warning != logged:
                _log.error(warning)
            logged = warning

    def _warning(self, files: Files) -> str | None:
        """Return a warning if the CA of the installation expires soon, or None. No process renews that CA."""
        expiry = authority_expiry(files)
        if self._store is None or expiry - datetime.now(UTC) > _CA_WARNING:
            return None
        return f"The CA of the serving certificate expires at {expiry:%Y-%m-%d %H:%M} UTC; {self._remedy}"
