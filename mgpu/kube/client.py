"""Sends requests to the API server, including paged lists and watches.

All processes and commands call the API server through `Api`. If the server answers with an error, an ApiError is
raised. If there is no complete answer, an Unreachable is raised.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import orjson
import urllib3

from mgpu.kube.decoding import decode, decode_list, decode_object
from mgpu.kube.server import NoCredentials, Server
from mgpu.kube.service_account import ServiceAccount

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
PAGE = 250
"""The most objects of a page of a list."""
PAGE_BYTES = 4 << 20
"""The most bytes of a page with more than one object. A page of `PAGE` ordinary pods has 2.5 MiB, but users can create
objects of more than 1 MiB. A page whose items cannot be decoded one by one (`mgpu.kube.decoding`) needs up to 25 times
as much memory."""
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""After 30 s of silence, up to 3 probes are sent at intervals of 10 s. Not every system has all these options."""
_SOCKET = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _PROBES.items() if hasattr(socket, name)),
]
"""TCP keep-alive, so that a watch fails within a minute if the server or a load balancer vanishes without closing."""
_SILENCE_SECONDS = 150.0
"""The longest silence of a watch before its connection counts as dead. Keep-alive is not enough: a proxy that
terminates TCP answers the probes even if its own connection to the server is dead. kube-apiserver sends the first
bookmark to each watch after two minutes, and then one every minute, so a watch of a healthy server is never silent for
so long."""
_GRACE_SECONDS = 5.0
"""A connection that is silent for this much longer than the requested length of its watch counts as dead."""
_LARGEST_ANSWER = 256 << 20
"""The most bytes, unpacked, that are read of an answer of a server behind the API server, which may be hostile. The
view of a node with eight cards and eight pods has 4.3 KB, so that of 60,000 such nodes can be read."""
_LARGEST_REFUSAL = 1 << 20
"""The most bytes, unpacked, that are read of an error. A Status object has a few KiB."""
_REFUSAL_SECONDS = 10.0
"""The most seconds for which an error is read, since a server behind the API server may send it byte by byte."""


class ApiError(Exception):
    """An error that the API server returned, with the HTTP status and the reason and message of its Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Unreachable(Exception):
    """There was no complete answer. The request may or may not have taken effect.

    Answers with the status 429 or 5xx are complete, so they raise ApiError instead.
    """


class _TooLong(Exception):
    """A page has more than `PAGE_BYTES`."""


class WatchSilent(Unreachable):
    """A watch was silent for so long that its connection counts as dead. The caller can begin a new watch."""


class Api:
    """A connection pool to an API server. Thread-safe.

    If you add a method that sends a request, override it in `mgpu.kube.fence.FencedApi` too.

    Paths are absolute, such as `/api/v1/namespaces/default/pods`. Every method that sends a request raises ApiError if
    the server answers with an error, and Unreachable if there is no complete answer in time.

    Args:
        timeout: The most seconds until the server begins to answer a request, and then between two parts of the answer.
            In a watch, it limits only the time to connect. None means no limit.
        pool: The most connections that are kept open.
        impersonation: The headers by which the requests have the rights of another user. A name may occur repeatedly.
    """

    def __init__(
        self,
        server: Server,
        *,
        timeout: float | None = 10.0,
        pool: int = 16,
        impersonation: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._server = server
        self._pool = server.make_pool(maxsize=pool, retries=False, socket_options=_SOCKET)
        self._timeout = timeout
        self._impersonation = tuple(impersonation)

    @classmethod
    def connect(
        cls,
        kubeconfig: str = "",
        *,
        context: str = "",
        timeout: float | None = 10.0,
        impersonation: Iterable[tuple[str, str]] = (),
    ) -> "Api":
        """Return an `Api` for the server of a kubeconfig file or of the cluster. No request is sent.

        Args:
            kubeconfig: The path of the file. "" means the default files, which are merged, or, if none of them exists
                and `context` is "", the service account of this pod.
            context: A context of the kubeconfig; "" means the current context.

        Raises:
            BadObject: There is no usable configuration.
        """
        return cls(_find_server(kubeconfig, context), timeout=timeout, impersonation=impersonation)

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return self._call("GET", path, query)

    def fetch(
        self, path: str, headers: Mapping[str, str], *, seconds: float | None, **query: object
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the body and the headers of an answer to GET, as a server behind the API server has written them.

        Args:
            headers: Further headers of the request.
            seconds: The most seconds until the server begins to answer, and then between two parts of the answer; None
                means no limit.
        """
        timeout = urllib3.Timeout(connect=self._timeout, read=seconds)
        response = self._send("GET", path, query, timeout=timeout, extra=headers)
        try:
            body = response.read(_LARGEST_ANSWER + 1)
            if len(body) > _LARGEST_ANSWER:
                response.close()
                raise Unreachable(f"GET {path}: the answer has more than {_LARGEST_ANSWER:,} bytes")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"GET {path}: {error}") from error
        finally:
            response.release_conn()
        return body, response.headers

    def fetch_within(self, path: str, *, seconds: float, most: int) -> bytes:
        """Return the body of an answer to GET, as a server behind the API server has written it.

        That server may be slow or hostile, so a small answer is read within a deadline.

        Args:
            seconds: The most seconds until the server begins to answer, and the most for the whole answer then.
            most: The most bytes, unpacked.
        """
        response = self._send("GET", path, {}, timeout=urllib3.Timeout(connect=seconds, read=seconds))
        try:
            body, is_whole = _read_within(response, seconds, most)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"GET {path}: {error}") from error
        finally:
            response.release_conn()
        if not is_whole:
            raise Unreachable(f"GET {path}: the answer takes more than {seconds:g} s or {most:,} bytes")
        return body

    def create(self, path: str, body: Mapping[str, Any], **query: object) -> dict[str, Any]:
        return self._call("POST", path, query, body)

    def replace(self, path: str, body: Mapping[str, Any], **query: object) -> dict[str, Any]:
        return self._call("PUT", path, query, body)

    def patch(self, path: str, body: object, content_type: str = MERGE_PATCH, **query: object) -> dict[str, Any]:
        return self._call("PATCH", path, query, body, content_type)

    def delete(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> dict[str, Any]:
        return self._call("DELETE", path, query, body)

    def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        """Yield the pages of a list, each with the resourceVersion of the whole list.

        A page can be iterated once. It decodes each object when it yields it, and may raise Unreachable then. Nearly
        all objects come without their `managedFields`. A page of more than `PAGE_BYTES` is requested again with fewer
        objects, so that neither many nor large objects take too much memory.
        """
        token, limit = "", PAGE
        while True:
            parameters = {**query, "limit": limit, **({"continue": token} if token else {})}
            try:
                text = self._page(path, parameters, PAGE_BYTES if limit > 1 else None)
                page, items = decode_list(text)
            except ValueError as error:
                raise Unreachable(f"GET {path}: {error}") from error
            except _TooLong:
                limit = max(1, limit // 4)
                continue
            if len(text) < PAGE_BYTES // 4:
                limit = min(PAGE, 2 * limit)
            meta = page.get("metadata") or {}
            if not meta.get("resourceVersion"):
                raise Unreachable(f"GET {path}: the answer is not a list")
            yield _readable(path, items), meta["resourceVersion"]
            token = meta.get("continue", "")
            if not token:
                return

    def watch(self, path: str, resource_version: str, *, seconds: int = 300, **query: Any) -> "Watch":
        """Return a watch for changes after `resource_version`. The server ends the watch after at most `seconds`.

        Iterating raises WatchSilent if nothing arrives for `_SILENCE_SECONDS`, or for `seconds + _GRACE_SECONDS` if
        that is shorter.
        """
        parameters = {
            **query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": seconds,
        }
        silence = min(seconds + _GRACE_SECONDS, _SILENCE_SECONDS)
        timeout = urllib3.Timeout(connect=self._timeout, read=silence)
        return Watch(path, self._send("GET", path, parameters, timeout=timeout))

    def close(self) -> None:
        self._pool.clear()

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: object = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        response = self._send(method, path, query, body, content_type)
        try:
            answer = decode(response.read())
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        finally:
            response.release_conn()
        return answer if isinstance(answer, dict) else {}

    def _page(self, path: str, query: Mapping[str, object], most: int | None) -> bytes:
        """Return the text of a page. Raises _TooLong if it has more than `most` bytes."""
        response = self._send("GET", path, query)
        try:
            text = response.read() if most is None else response.read(most + 1)
            if most is not None and len(text) > most:
                response.close()
                raise _TooLong
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"GET {path}: {error}") from error
        finally:
            response.release_conn()
        return text

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: object = None,
        content_type: str = "application/json",
        timeout: urllib3.Timeout | None = None,
        extra: Mapping[str, str] = MappingProxyType({}),
    ) -> urllib3.BaseHTTPResponse:
        headers = urllib3.HTTPHeaderDict(
            {
                "Accept": "application/json",
                **({"Content-Type": content_type} if body is not None else {}),
                **extra,
            }
        )
        try:
            headers.update(self._server.credentials())
        except (NoCredentials, OSError) as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        for name, value in self._impersonation:
            headers.add(name, value)
        encoded = urlencode({k: v for k, v in query.items() if v not in (None, "")})
        try:
            response: urllib3.BaseHTTPResponse = self._pool.request(
                method,
                f"{self._server.url}{path}{'?' + encoded if encoded else ''}",
                body=None if body is None else orjson.dumps(body),
                headers=headers,
                timeout=timeout or urllib3.Timeout(total=self._timeout),
                preload_content=False,
            )
            if response.status >= 400:
                text, _ = _read_within(response, _REFUSAL_SECONDS, _LARGEST_REFUSAL)
                raise _refusal(response.status, _decode(text))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        return response

    # This is the last method, because after it the name `list` in the class body means the method and not the type.
    def list(self, path: str, **query: object) -> tuple[list[dict[str, Any]], str]:
        """Return all items, and the resourceVersion from which to watch."""
        items: list[dict[str, Any]] = []
        version = ""
        for page, version in self.pages(path, **query):  # noqa: B007
            items += page
        return items, version


class Watch:
    """An iterable of events. Each is a type (`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`) and an object.

    Iterating raises ApiError if the server reports an error, WatchSilent if the connection is silent for too long, and
    Unreachable if the stream breaks in another way. The status 410 of an ApiError means that the version is too old and
    that a new list is needed.
    """

    def __init__(self, path: str, response: urllib3.BaseHTTPResponse) -> None:
        self._path = path
        self._response = response

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            for line in _lines(self._response):
                event = decode_object(line)
                if event["type"] == "ERROR":
                    raise _refusal(event["object"].get("code", 500), event["object"])
                yield event["type"], event["object"]
        except urllib3.exceptions.ReadTimeoutError as error:
            raise WatchSilent(f"watch of {self._path}: {error}") from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unreachable(f"watch of {self._path}: {error}") from error

    def close(self) -> None:
        """Close the connection. Only the thread that iterates may call this method."""
        self._response.close()
        self._response.release_conn()

    def end(self) -> None:
        """End the iteration. Any thread may call this method."""
        with contextlib.suppress(ValueError, RuntimeError, OSError):  # the watch has ended already
            self._response.shutdown()


def find_kubeconfig(named: str) -> str:
    """Return the paths of the kubeconfig files, joined as in the variable KUBECONFIG.

    The result is "" if the user has named none and no default file exists. pathlib is not used, because it fails for
    users without a home directory.
    """
    default = os.environ.get("KUBECONFIG", "~/.kube/config")
    exists = any(os.path.exists(os.path.expanduser(path)) for path in default.split(os.pathsep))
    return named or (default if exists else "")


def _find_server(kubeconfig: str, context: str) -> Server:
    """Return the server of `Api.connect`. Raises BadObject."""
    files = find_kubeconfig(kubeconfig)
    if not files and not context:
        return ServiceAccount(os.environ)
    from mgpu.kube.kubeconfig import read_kubeconfig  # Only now, because pods do without the kubernetes package.

    return read_kubeconfig(files, context)


def _readable(path: str, items: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    try:
        yield from items
    except ValueError as error:
        raise Unreachable(f"GET {path}: {error}") from error


def _read_within(response: urllib3.BaseHTTPResponse, seconds: float, most: int) -> tuple[bytes, bool]:
    """Return the body of an answer, and whether it is whole.

    It is not whole if it has more than `most` bytes, or has not arrived after about `seconds`. The connection is then
    closed, since it cannot be used again.
    """
    until = time.monotonic() + seconds
    parts: list[bytes] = []
    left = most
    while part := response.read1(left + 1):
        parts.append(part[:left])
        if len(part) > left or time.monotonic() > until:
            response.close()
            return b"".join(parts), False
        left -= len(part)
    return b"".join(parts), True


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for chunk in response.stream(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)


def _decode(body: bytes) -> object:
    try:
        return decode(body)
    except ValueError:
        return {"message": body.decode(errors="replace").strip()}


def _refusal(status: int, answer: object) -> ApiError:
    # A server behind the API server's proxy, such as mgpu's, may answer with an object of its own.
    status_object = answer if isinstance(answer, dict) else {}
    message = status_object.get("message") or status_object.get("error") or answer
    return ApiError(status, str(status_object.get("reason") or ""), str(message))
