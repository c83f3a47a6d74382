"""What an `Api` needs to know about its API server: where it is, and how to prove to it who asks."""

from collections.abc import Mapping
from typing import Any, Protocol

import urllib3


class NoCredentials(Exception):
    """The credentials cannot be read at present. A later request may succeed."""


class Server(Protocol):
    """An API server, with the credentials of this process. Thread-safe.

    Attributes:
        url: the address, without a slash at the end.
    """

    @property
    def url(self) -> str: ...

    def make_pool(self, **options: Any) -> urllib3.PoolManager:
        """Return a connection pool that verifies the server's certificate.

        Args:
            options: further arguments of the pool, such as `maxsize`.
        """

    def credentials(self) -> Mapping[str, str]:
        """Return the headers that prove who asks. Raises NoCredentials or OSError.

        Called for each request, since tokens expire.
        """
