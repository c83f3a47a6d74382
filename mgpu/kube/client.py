"""Sends requests to the API server: CRUD, paged lists, and watches."""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import orjson
import urllib3
from kubernetes import client, config
from kubernetes.config import kube_config

from mgpu.kube.decoding import decode
from mgpu.model.errors import BadObject, Problem

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
PAGE = 500
"""The most objects of a page."""
PAGE_BYTES = 4 << 20
"""The most bytes of a page with more than one object. Decoded they take up to 25 times as much memory. A page of
ordinary pods has half of it, but users can make each object larger than 1 MiB."""
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds; not every system has them all
_SOCKET = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _PROBES.items() if hasattr(socket, name)),
]
"""TCP keep-alive: a watch notices within a minute that the server, or a load balancer, vanished without closing."""
_SILENCE_SECONDS = 150.0
"""The longest silence of a watch before its connection counts as dead. Keep-alive is not enough: a proxy that
terminates TCP answers the probes although its own connection to the server is dead. kube-apiserver sends each watch a
bookmark every minute, the first after two, so that a healthy server gets no additional requests."""
_GRACE_SECONDS = 5.0
"""A server ends a watch after the requested time. After this additional time the connection counts as dead."""
_loading = threading.Lock()


class ApiError(Exception):
    """A refusal of the API server: HTTP status, and reason (`NotFound`, `Conflict`, …) and message of the Status."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class Unreachable(Exception):
    """No complete answer: it is unknown whether the request took effect. 5xx and 429 are ApiErrors instead."""


class _TooLong(Exception):
    """The answer is longer than its limit."""


class WatchSilent(Unreachable):
    """A watch was silent for so long that its connection counts as dead. Start a new watch from the same version."""


class Api:
    """A connection pool to an API server. Thread-safe. Paths are absolute: `/api/v1/namespaces/default/pods`.

    Every call raises ApiError for a refusal, and Unreachable if no answer comes within `timeout` seconds.
    """

    def __init__(self, configuration: client.Configuration, *, timeout: float = 10.0, pool: int = 16) -> None:
        configuration.connection_pool_maxsize = pool
        configuration.retries = False
        configuration.socket_options = _SOCKET
        self._configuration = configuration
        self._pool: urllib3.PoolManager = client.ApiClient(configuration).rest_client.pool_manager
        self._host: str = configuration.host.rstrip("/")
        self._timeout = timeout

    @classmethod
    def connect(cls, kubeconfig: str = "", *, context: str = "", timeout: float = 10.0) -> "Api":
        """Connect with a kubeconfig file; "" means the default file, or else the in-cluster configuration.

        Args:
            context: a context of the kubeconfig, "" for its current one.

        Raises:
            BadObject: there is no usable configuration.
        """
        configuration = client.Configuration()
        with _loading:
            try:
                # Not `config.load_config`, which prints a warning in a cluster. Not pathlib, which fails for users
                # without a home directory.
                default = os.path.expanduser(kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
                if kubeconfig or context or os.path.exists(default):
                    config.load_kube_config(  # type: ignore[no-untyped-call]
                        kubeconfig or None, context=context or None, client_configuration=configuration
                    )
                else:
                    config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                api = cls(configuration, timeout=timeout)
                if kube_config._temp_files:
                    api._read_certificates()
            except (config.ConfigException, OSError, ValueError) as error:
                raise BadObject([Problem(kubeconfig or "kubeconfig", " ".join(str(error).split()))]) from error
            finally:
                kube_config._cleanup_temp_files()  # type: ignore[no-untyped-call]
        return api

    def _read_certificates(self) -> None:
        """Load certificates once, so that the temporary files can be removed at once.

        The client library writes inline certificates and keys of a kubeconfig to temporary files and reads them for
        each connection; a killed process would leave keys behind.
        """
        read, pool = self._configuration, self._pool.connection_pool_kw
        context = ssl.create_default_context(cafile=read.ssl_ca_cert)
        context.check_hostname = bool(read.verify_ssl)
        if read.cert_file:
            context.load_cert_chain(read.cert_file, read.key_file)
        for name in ("ca_certs", "cert_file", "key_file"):
            pool.pop(name, None)
        pool["ssl_context"] = context

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return self._call("GET", path, query)

    def create(self, path: str, body: Mapping[str, Any], **query: object) -> dict[str, Any]:
        return self._call("POST", path, query, body)

    def replace(self, path: str, body: Mapping[str, Any], **query: object) -> dict[str, Any]:
        return self._call("PUT", path, query, body)

    def patch(self, path: str, body: object, content_type: str = MERGE_PATCH, **query: object) -> dict[str, Any]:
        return self._call("PATCH", path, query, body, content_type)

    def delete(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> dict[str, Any]:
        return self._call("DELETE", path, query, body)

    def pages(self, path: str, **query: object) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """Return the items page by page, each page with the resourceVersion of the whole list.

        A page of more than `PAGE_BYTES` is requested again in smaller parts, so that neither a large cluster nor large
        objects are in memory at once.
        """
        token, limit = "", PAGE
        while True:
            asked = {**query, "limit": limit, **({"continue": token} if token else {})}
            try:
                page, size = self._page(path, asked, PAGE_BYTES if limit > 1 else None)
            except _TooLong:
                limit = max(1, limit // 4)
                continue
            if size < PAGE_BYTES // 4:
                limit = min(PAGE, 2 * limit)
            meta = page.get("metadata") or {}
            if not meta.get("resourceVersion"):
                raise Unreachable(f"GET {path}: the answer is no list")
            yield page.get("items") or [], meta["resourceVersion"]
            token = meta.get("continue", "")
            if not token:
                return

    def watch(self, path: str, resource_version: str, *, seconds: int = 300, **query: Any) -> "Watch":
        """Watch for changes after `resource_version`, until the server ends the watch, after `seconds` at most.

        Where nothing arrives for `_SILENCE_SECONDS`, or after the end is due, iterating raises Silent.
        """
        asked = {
            **query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": seconds,
        }
        silence = min(seconds + _GRACE_SECONDS, _SILENCE_SECONDS)
        timeout = urllib3.Timeout(connect=self._timeout, read=silence)
        return Watch(path, self._send("GET", path, asked, timeout=timeout))

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

    def _page(self, path: str, query: Mapping[str, object], most: int | None) -> tuple[dict[str, Any], int]:
        """Return a page and its size in bytes. Raises _TooLong where it has more than `most`."""
        response = self._send("GET", path, query)
        try:
            text = response.read() if most is None else response.read(most + 1)
            if most is not None and len(text) > most:
                response.close()
                raise _TooLong
            answer = decode(text)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unreachable(f"GET {path}: {error}") from error
        finally:
            response.release_conn()
        return answer if isinstance(answer, dict) else {}, len(text)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: object = None,
        content_type: str = "application/json",
        timeout: urllib3.Timeout | None = None,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", **({"Content-Type": content_type} if body is not None else {})}
        try:
            credentials: Any = self._configuration.auth_settings()  # reads the token file again from time to time
        except (config.ConfigException, OSError) as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        for credential in credentials.values():
            if credential["in"] == "header":
                headers[credential["key"]] = credential["value"]
        asked = urlencode({k: v for k, v in query.items() if v not in (None, "")})
        try:
            response: urllib3.BaseHTTPResponse = self._pool.request(
                method,
                f"{self._host}{path}{'?' + asked if asked else ''}",
                body=None if body is None else orjson.dumps(body),
                headers=headers,
                timeout=timeout or urllib3.Timeout(total=self._timeout),
                preload_content=False,
            )
            if response.status >= 400:
                raise _refusal(response.status, _decode(response.read()))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        return response

    # The last method, because in the class body below it `list` is no longer the type.
    def list(self, path: str, **query: object) -> tuple[list[dict[str, Any]], str]:
        """Return all items, and the resourceVersion to watch from."""
        items: list[dict[str, Any]] = []
        version = ""
        for page, version in self.pages(path, **query):  # noqa: B007
            items += page
        return items, version


class Watch:
    """An iterator over (`ADDED` | `MODIFIED` | `DELETED` | `BOOKMARK`, object).

    Raises ApiError 410 if the version is too old (list again), Silent if the connection is half-open, and Unreachable
    if the stream breaks in another way.
    """

    def __init__(self, path: str, response: urllib3.BaseHTTPResponse) -> None:
        self._path, self._response = path, response

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            for line in _lines(self._response):
                event = decode(line)
                if event["type"] == "ERROR":
                    raise _refusal(event["object"].get("code", 500), event["object"])
                yield event["type"], event["object"]
        except urllib3.exceptions.ReadTimeoutError as error:
            raise WatchSilent(f"watch of {self._path}: {error}") from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unreachable(f"watch of {self._path}: {error}") from error

    def close(self) -> None:
        """Close the connection. Only the thread that iterates may call this."""
        self._response.close()
        self._response.release_conn()

    def end(self) -> None:
        """End the iteration. Any thread may call this."""
        with contextlib.suppress(ValueError, RuntimeError, OSError):  # it has ended already
            self._response.shutdown()


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
    told = answer if isinstance(answer, dict) else {}
    return ApiError(status, str(told.get("reason") or ""), str(told.get("message") or answer))
