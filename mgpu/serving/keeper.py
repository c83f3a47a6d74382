"""Keeps a process's self-made serving certificate current."""

import logging
import threading
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from mgpu.serving.certificates import Authority, Files, Store, authority_expires, ensure, expires
from mgpu.serving.folder import Folder

_log = logging.getLogger(__name__)
ROUND_SECONDS = 60.0
RETRY_SECONDS = 2.0
_CA_WARNING = timedelta(days=60)


class Keeper:
    """Renews the certificate in `folder`, in a thread of its own.

    store: a store that replicas share. The CA in it is the installation's; without a store the process has its own.
    remedy: the command that mends a CA that is missing or ends soon.
    """

    def __init__(self, folder: Folder, names: Collection[str], store: Store | None = None, remedy: str = "") -> None:
        self._folder, self._names, self._store, self._remedy = folder, names, store, remedy
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> Files:
        """The certificate's files, now in the folder. Raises RetryLater, NoAuthority and what the store raises."""
        if self._store is None:
            return ensure(self._folder, self._names, datetime.now(UTC))
        files = ensure(self._store, self._names, datetime.now(UTC), Authority.GIVEN)
        self._folder.put(files)
        return files

    def start(self) -> None:
        """Do so in a thread of this process, from now on."""
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end."""
        if self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        told = ""
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                files = self.renew()
                warning = self._warning(files)
            except Exception as error:  # noqa: BLE001 (a thread's outermost loop: whatever it was may pass)
                pause = RETRY_SECONDS
                warning = f"Serving certificate not renewed: {error or type(error).__name__}; {self._remedy}"
            else:
                pause = ROUND_SECONDS
                _log.debug("certificate current", extra={"expires": expires(files).isoformat()})
            if warning and warning != told:
                _log.error(warning)
            told = warning

    def _warning(self, files: Files) -> str:
        """The end of a CA that the installation made comes without anybody renewing it."""
        ends = authority_expires(files)
        if self._store is None or ends - datetime.now(UTC) > _CA_WARNING:
            return ""
        return f"The CA of the serving certificate ends at {ends:%Y-%m-%d %H:%M} UTC; {self._remedy}"
