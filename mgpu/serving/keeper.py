"""Keeps a process's self-made certificate current, and what the API server trusts."""

import logging
import threading
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from mgpu.serving.certificates import CA, Files, Store, ensure, expires
from mgpu.serving.folder import Folder

_log = logging.getLogger(__name__)
ROUND_SECONDS = 60.0
RETRY_SECONDS = 2.0


class Keeper:
    """Renews the certificate in `folder` (through `store` where replicas share one), then has its CA published.

    publish: puts a CA bundle where clients look for it; None: nobody needs telling. It may raise anything.
    """

    def __init__(
        self,
        folder: Folder,
        names: Collection[str],
        store: Store | None = None,
        publish: Callable[[bytes], None] | None = None,
    ) -> None:
        self._folder, self._names, self._store, self._publish = folder, names, store, publish
        self._missing = "the CA bundle is not published yet" if publish else ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> Files:
        """The certificate's files, now in the folder. Raises RetryLater and what the store raises."""
        files = ensure(self._store or self._folder, self._names, datetime.now(UTC))
        if self._store:
            self._folder.put(files)
        return files

    def ready(self) -> str:
        """Why clients cannot trust this process yet; "": they can."""
        return self._missing

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
                if self._publish:
                    self._publish(files[CA])
            except Exception as error:  # noqa: BLE001 (a thread's outermost loop: whatever it was may pass)
                pause = RETRY_SECONDS
                if str(error) != told:
                    told = str(error)
                    _log.warning("certificates not renewed and published: %s", error)
            else:
                pause, told, self._missing = ROUND_SECONDS, "", ""
                _log.debug("certificate current", extra={"expires": expires(files).isoformat()})
