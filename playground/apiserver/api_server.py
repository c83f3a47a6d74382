"""Serves the Kubernetes API over HTTP: authenticates, authorizes and routes each request, and writes the response.

`ApiServer` runs on the caller's event loop. `Served` and `running` run a server on an event loop in a thread of its
own. `reads`, `writes`, `deletions` and `subresources` handle the requests for objects. Mainly `playground.cluster` and
the tests create an `ApiServer`.
"""

import asyncio
import ssl
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from aiohttp import web

from playground.apiserver import discovery, subresources
from playground.apiserver.admission_webhooks import Admission, WebhookClient
from playground.apiserver.api_errors import ApiError, method_not_allowed, no_such_path, plain
from playground.apiserver.authorization import Authorizer, Request
from playground.apiserver.calls import Call, Path, User, parse_path
from playground.apiserver.deletions import Deleter, Lifecycle
from playground.apiserver.hosting import Listener
from playground.apiserver.kinds import Registry
from playground.apiserver.kubectl_tables import table
from playground.apiserver.objects import complete, normalise
from playground.apiserver.proxies import Proxy
from playground.apiserver.reads import Render, Watch, existing, list_items, render, render_list
from playground.apiserver.storage import Item, Object, Storage, TooLarge
from playground.apiserver.subresources import Binder, LogSource
from playground.apiserver.writes import Writer

T = TypeVar("T")

_MAX_BODY = 3 * 1024 * 1024
_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system", "mgpu-system")
_HEALTH = ("/healthz", "/livez", "/readyz")


class ApiServer:
    """A Kubernetes API server in memory.

    Args:
        tokens: The user of each bearer token.
        restricted: The names of the users whose requests RBAC authorizes. All other users may do everything.
        log_source: Returns the log of a container. If it is None, every log is empty.
        history: How many of the latest changes are kept for each resource. A watch can start at any of them.
        bookmark_every: The seconds without a change after which a watch sends a bookmark.

    Attributes:
        services: The proxy, with the Services that it reaches.
    """

    def __init__(
        self,
        *,
        tokens: Mapping[str, User],
        restricted: Collection[str] = (),
        log_source: LogSource | None = None,
        history: int = 10_000,
        bookmark_every: float = 15.0,
    ) -> None:
        self.storage = Storage(history)
        self.registry = Registry()
        self._tokens = dict(tokens)
        self._log_source = log_source
        self._bookmark_every = bookmark_every
        self._authorizer = Authorizer(self.storage, restricted)
        self._webhooks = WebhookClient()
        admission = Admission(self.storage, self._webhooks)
        lifecycle = Lifecycle(self.storage, self.registry)
        self._writer = Writer(self.storage, admission, lifecycle, self._authorizer)
        self._deleter = Deleter(self.storage, admission, lifecycle)
        self._binder = Binder(self.storage, admission)
        self.services = Proxy(self.storage)
        self._runner: web.AppRunner | None = None
        self._listeners: list[Listener] = []
        for name in _NAMESPACES:
            kind = self.registry.of("namespaces")
            namespace, _ = normalise(kind, {"metadata": {"name": name}})
            complete(kind, namespace)
            self.storage.create("namespaces", namespace)

    @property
    def requests(self) -> frozenset[Request]:
        """The requests that the restricted users have made so far, allowed or not. Any thread may read it."""
        return frozenset(self._authorizer.requests)

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None) -> str:
        """Serve at one more address and return its URL.

        Args:
            port: The port to listen on. If it is 0, the kernel chooses a free port.
            tls: The paths of the certificate and of its key. Without them the server speaks plain HTTP, over which
                kubectl does not send its token.
        """
        context = None
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
        if self._runner is None:
            app = web.Application(client_max_size=_MAX_BODY)
            app.router.add_route("*", "/{path:.*}", self._respond)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
            await self._runner.setup()
        listener = Listener(host, port)
        self._listeners.append(listener)
        await web.SockSite(self._runner, listener, ssl_context=context).start()
        return f"{'https' if tls else 'http'}://{host}:{listener.port}"

    async def stop(self, *, abruptly: bool = False) -> None:
        """Stop serving. The server can be started again, and keeps its objects.

        By default, every watch ends first. With `abruptly`, the connections are closed at once, and requests in
        progress get no answer.
        """
        if not abruptly:
            for collection in self.storage.collections().values():
                for watcher in collection.watchers:
                    watcher.close()
        if self._runner:
            for listener in self._listeners:
                await listener.stop_accepting()
                if abruptly:
                    listener.hang_up()
            await self._runner.cleanup()
            for listener in self._listeners:
                listener.hang_up()  # clients that keep their connections open do not close them
                await listener.closed()
            self._runner = None
            self._listeners = []
        await self._webhooks.close()

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. If it is refused, the answer is a Status."""
        warnings: list[str] = []
        try:
            return await self._route(request, warnings)
        except ApiError as problem:
            return reply(problem.code, problem.status(), warnings)
        except TooLarge:
            return reply(500, plain(500, "etcdserver: request is too large").status(), warnings)
        except web.HTTPRequestEntityTooLarge:
            too_large = ApiError(413, "RequestEntityTooLarge", f"Request entity too large: limit is {_MAX_BODY}")
            return reply(413, too_large.status(), warnings)

    async def _route(self, request: web.Request, warnings: list[str]) -> web.StreamResponse:
        """Authenticate and authorize a request, and pass it to the function that handles it."""
        path = request.path.rstrip("/") or "/"
        if path == "/version":
            return reply(200, discovery.VERSION, [])
        if path.startswith(_HEALTH):
            return web.Response(text="ok")
        user = self._user(request)
        if request.method == "GET" and (document := discovery.document(self.registry, path)) is not None:
            return reply(200, document, [])
        right = self.services.right(request.method, path, user)
        if right is not None:
            self._authorizer.require(right)
            return await self.services.answer(request, right)
        where = self._where(path)
        call = Call(
            path=where or Path(self.registry.of("pods")),
            user=user,
            query=request.query,
            accept=request.headers.get("Accept", ""),
            content_type=request.headers.get("Content-Type", ""),
            body=await request.read() if request.can_read_body else b"",
            warnings=warnings,
        )
        if where is None:
            return self._without_resource(request, path, call)
        self._authorizer.check(request.method, call)
        applied = call.content_type.startswith("application/apply-patch+") and not where.subresource
        if applied and self.storage.get(where.kind.resource, where.namespace, where.name) is None:
            self._authorizer.check("POST", call)  # applying an object that does not exist creates it
        if where.subresource not in ("", "status"):
            return await self._subresource(request.method, call)
        if where.subresource and where.subresource not in where.kind.subresources:
            raise no_such_path()
        return await (self._one(request.method, call) if where.name else self._several(request, call))

    def _user(self, request: web.Request) -> User:
        """Return the user of the request's bearer token, or the user whom that user impersonates.

        Raises a 401 if the token is missing or unknown. Every user may impersonate any other.
        """
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        user = self._tokens.get(token) if scheme.lower() == "bearer" else None
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if other := request.headers.get("Impersonate-User"):
            return User(other, tuple(request.headers.getall("Impersonate-Group", ())))
        return user

    def _where(self, path: str) -> Path | None:
        """Return the resource that a URL path names, or None if it names none."""
        parts = path.split("/")
        if parts[:4] == ["", "api", "v1", "namespaces"] and parts[5:] == ["bindings"]:
            return Path(self.registry.of("pods"), parts[4], "", "bindings")
        return parse_path(path, self.registry)

    def _without_resource(self, request: web.Request, path: str, call: Call) -> web.Response:
        """Answer a request for a path that names no stored resource.

        A SelfSubjectAccessReview or SelfSubjectReview is answered. Any other request gets a 404, with a Status if the
        group and version are served, and otherwise with plain text.
        """
        if request.method == "POST":
            review = subresources.self_review(call, path.rpartition("/")[2], self._authorizer.may)
            if review is not None:
                return reply(201, review, [])
        parts = path.strip("/").split("/")
        if discovery.resources(self.registry, "/".join(parts[1 : 2 if parts[0] == "api" else 3])):
            raise no_such_path()
        return web.Response(status=404, text="404 page not found\n")

    async def _subresource(self, method: str, call: Call) -> web.StreamResponse:
        """Handle a request for a subresource other than `status`."""
        sub = call.path.subresource
        if sub == "log" and method == "GET":
            text = await subresources.log(self.storage, self._log_source, call)
            return web.Response(status=204) if text is None else web.Response(text=text)
        if sub != "bindings" and sub not in call.path.kind.subresources:
            raise no_such_path()
        if method != "POST" or sub == "log":
            raise method_not_allowed()
        if sub == "eviction":
            return reply(201, await subresources.evict(self.storage, self._deleter, call), call.warnings)
        return reply(201, await self._binder.bind(call, legacy=sub == "bindings"), call.warnings)

    async def _one(self, method: str, call: Call) -> web.StreamResponse:
        """Handle a request for one object or for its status."""
        if method == "GET":
            item = existing(self.storage, call)
            return reply(200, _row(call, item), []) if _wants_table(call) else _item(200, item, call)
        if method == "PUT":
            return _item(200, await self._writer.update(call), call)
        if method == "PATCH":
            item, new = await self._writer.patch(call)
            return _item(201 if new else 200, item, call)
        if method == "DELETE" and not call.path.subresource:
            result = await self._deleter.delete(call)
            return _item(200, result, call) if isinstance(result, Item) else reply(200, result, call.warnings)
        raise method_not_allowed()

    async def _several(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Handle a request for a collection."""
        path, method = call.path, request.method
        if method == "GET" and call.flag("watch"):
            return await self._watch(request, call)
        if method == "GET":
            items, metadata = list_items(self.storage, call)
            if _wants_table(call):
                return reply(200, table(items, path.kind, metadata, _include(call)), [])
            return reply(200, render_list(items, metadata, path.kind), [])
        if method == "DELETE":
            items = await self._deleter.delete_collection(call)
            return reply(200, render_list(items, {"resourceVersion": str(self.storage.rv)}, path.kind), call.warnings)
        if method != "POST" or (path.kind.namespaced and not path.namespace):
            raise method_not_allowed()
        return _item(201, await self._writer.create(call), call)

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Stream the events of a watch until it ends or the client closes the connection."""
        show: Render | None = None
        if _wants_table(call):
            header = iter((True,))  # only the first Table of a watch contains the column definitions

            def show_row(item: Item) -> bytes:
                return _row(call, item, header=next(header, False))

            show = show_row
        lines = Watch(self.storage, call, show, self._bookmark_every).lines()
        headers_sent = {"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
        response = web.StreamResponse(headers=headers_sent)
        await response.prepare(request)
        try:
            async for line in lines:
                await response.write(line)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            pass  # the client has closed the connection
        finally:
            await lines.aclose()
        return response


def reply(code: int, document: Object | bytes, warnings: list[str]) -> web.Response:
    """Return a JSON response. Each different warning becomes a `Warning` header."""
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    response = web.Response(status=code, body=body, content_type="application/json")
    for text in dict.fromkeys(warnings):
        quoted = " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def _item(code: int, item: Item, call: Call) -> web.Response:
    return reply(code, render(item, call.path.kind), call.warnings)


def _wants_table(call: Call) -> bool:
    return "as=Table" in call.accept and "v=v1" in call.accept


def _include(call: Call) -> str:
    return call.query.get("includeObject", "Metadata")


def _row(call: Call, item: Item, *, header: bool = True) -> bytes:
    metadata = {"resourceVersion": item.obj["metadata"]["resourceVersion"]}
    return table([item], call.path.kind, metadata, _include(call), header=header)


class Served:
    """Runs an API server on an event loop in a thread of its own. `close` ends the thread.

    `start` and `kill` may alternate any number of times. The stored objects remain, as in etcd. If the port is 0, the
    first start chooses a free port, and every later start uses the same port.
    """

    def __init__(
        self, server: ApiServer, *, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None
    ) -> None:
        self._server = server
        self._host = host
        self._port = port
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="apiserver", daemon=True)
        self._thread.start()

    def start(self) -> str:
        """Serve, and return the URL."""
        url = self._wait(self._server.start(self._host, self._port, self._tls))
        self._port = int(url.rpartition(":")[2])
        return url

    def kill(self) -> None:
        """Stop the server and close every connection at once. Requests in progress get no answer."""
        self._wait(self._server.stop(abruptly=True))

    def close(self) -> None:
        """Stop the server and end its thread. After that, do not call `start` again."""
        self._wait(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)


@contextmanager
def running(
    server: ApiServer, *, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None
) -> Iterator[str]:
    """Run an API server until the context ends. The value of the context is the URL of the server."""
    served = Served(server, host=host, port=port, tls=tls)
    try:
        yield served.start()
    finally:
        served.close()
