"""The API server: one process, in memory, on one event loop."""

import ssl
from collections.abc import Collection, Mapping
from typing import Any

from aiohttp import web

from playground.apiserver import discovery, subresources
from playground.apiserver.admission import Admission
from playground.apiserver.attributes import User
from playground.apiserver.authorization import Authorizer, Request
from playground.apiserver.bindings import Binder
from playground.apiserver.deletions import Deleter
from playground.apiserver.errors import ApiError, method_not_allowed, no_such_path, plain, unauthorized
from playground.apiserver.handlers import Handlers
from playground.apiserver.kinds import Registry
from playground.apiserver.lifecycle import Lifecycle
from playground.apiserver.listening import Listener
from playground.apiserver.objects import complete, normalise
from playground.apiserver.replies import reply
from playground.apiserver.routes import Call, Path, parse_path
from playground.apiserver.storage import Storage, TooLarge
from playground.apiserver.subresources import LogSource
from playground.apiserver.webhooks import ServiceResolver, WebhookClient
from playground.apiserver.writes import Writer

_MAX_BODY = 3 * 1024 * 1024
_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system", "mgpu-system")
_OPEN = ("/healthz", "/livez", "/readyz", "/version")


class ApiServer:
    """`tokens` maps bearer tokens to users; whoever has one may do everything, unless `restricted` has his name: then
    only what the stored roles allow him.

    `log_source(namespace, pod, container)` gives a container's log or raises LookupError; `service_resolver(namespace,
    name, port)` gives the (host, port) of a Service that a webhook is reached through, or raises LookupError.
    `history` is how many changes of a resource a watch can go back. Every object of `storage` is immutable.
    """

    def __init__(
        self,
        *,
        tokens: Mapping[str, User],
        restricted: Collection[str] = (),
        log_source: LogSource | None = None,
        service_resolver: ServiceResolver | None = None,
        history: int = 10_000,
        bookmark_every: float = 15.0,
    ) -> None:
        self.storage, self.registry = Storage(history), Registry()
        self._tokens, self._log_source = dict(tokens), log_source
        self._authorizer = Authorizer(self.storage, restricted)
        self._webhooks = WebhookClient(service_resolver)
        admission = Admission(self.storage, self._webhooks)
        lifecycle = Lifecycle(self.storage, self.registry)
        writer = Writer(self.storage, admission, lifecycle)
        self._deleter = Deleter(self.storage, admission, lifecycle)
        self._binder = Binder(self.storage, admission)
        self._handlers = Handlers(self.storage, writer, self._deleter, bookmark_every)
        self._runner: web.AppRunner | None = None
        self._listeners: list[Listener] = []
        for name in _NAMESPACES:
            kind = self.registry.of("namespaces")
            namespace, _ = normalise(kind, {"metadata": {"name": name}})
            complete(kind, namespace)
            self.storage.create("namespaces", namespace)

    @property
    def requests(self) -> frozenset[Request]:
        """What the restricted users have asked for so far. From any thread."""
        return frozenset(self._authorizer.requests)

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None) -> str:
        """Serve, beside what is served already; returns the URL.

        `tls` are the paths of certificate and key. Without it plain HTTP is served, over which kubectl sends no token.
        """
        context = None
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
        if self._runner is None:
            app = web.Application(client_max_size=_MAX_BODY)
            app.router.add_route("*", "/{path:.*}", self._answer)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
            await self._runner.setup()
        listener = Listener(host, port)
        self._listeners.append(listener)
        await web.SockSite(self._runner, listener, ssl_context=context).start()
        return f"{'https' if tls else 'http'}://{host}:{listener.port}"

    async def stop(self, *, abruptly: bool = False) -> None:
        """Ends every watch, then the server; abruptly: and no request is answered any more. It can be started again."""
        if not abruptly:
            for collection in self.storage.collections().values():
                for watcher in collection.watchers:
                    watcher.close()
        if self._runner:
            for listener in self._listeners:
                await listener.ended()
                if abruptly:
                    listener.hang_up()
            await self._runner.cleanup()
            for listener in self._listeners:
                listener.hang_up()  # a client that keeps its connection open need not say goodbye
                await listener.closed()
            self._runner, self._listeners = None, []
        await self._webhooks.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
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
        path = request.path.rstrip("/") or "/"
        if path in _OPEN or path.startswith(("/livez/", "/readyz/", "/healthz/")):
            return reply(200, discovery.VERSION, []) if path == "/version" else web.Response(text="ok")
        user = self._user(request)
        if (document := self._discovery(path)) is not None and request.method == "GET":
            return reply(200, document, [])
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
        plural = path.rpartition("/")[2]
        if where is None:
            review = subresources.self_review(call, plural, self._authorizer.may) if request.method == "POST" else None
            if review is None:
                return self._unknown(path)
            return reply(201, review, [])
        self._authorizer.check(request.method, call)
        applied = call.content_type.startswith("application/apply-patch+") and not where.subresource
        if applied and self.storage.get(where.kind.resource, where.namespace, where.name) is None:
            self._authorizer.check("POST", call)  # an apply of what is not there creates it
        if where.subresource not in ("", "status"):
            return await self._subresource(request.method, call)
        return await self._handlers.handle(request, call)

    def _unknown(self, path: str) -> web.Response:
        """Text where no such group is served, a Status where only the resource is not."""
        parts = path.strip("/").split("/")
        known = discovery.resources(self.registry, "/".join(parts[1 : 2 if parts[0] == "api" else 3]))
        return (
            reply(404, no_such_path().status(), []) if known else web.Response(status=404, text="404 page not found\n")
        )

    def _where(self, path: str) -> Path | None:
        parts = path.split("/")
        if parts[:4] == ["", "api", "v1", "namespaces"] and parts[5:] == ["bindings"]:
            return Path(self.registry.of("pods"), parts[4], "", "bindings")
        return parse_path(path, self.registry)

    async def _subresource(self, method: str, call: Call) -> web.StreamResponse:
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

    def _user(self, request: web.Request) -> User:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        user = self._tokens.get(token) if scheme.lower() == "bearer" else None
        if user is None:
            raise unauthorized()
        if other := request.headers.get("Impersonate-User"):
            return User(other, tuple(request.headers.getall("Impersonate-Group", ())))
        return user

    def _discovery(self, path: str) -> Any:
        registry, parts = self.registry, path.strip("/").split("/")
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        if parts == ["apis"]:
            return discovery.groups(registry)
        if parts[0] == "apis" and len(parts) == 2:
            return discovery.group(registry, parts[1])
        if parts == ["api", "v1"] or (parts[0] == "apis" and len(parts) == 3):
            return discovery.resources(registry, "/".join(parts[1:]))
        if parts == ["openapi", "v3"]:
            return discovery.openapi_index(registry)
        if parts[:2] == ["openapi", "v3"]:
            return discovery.openapi(registry, "/".join(parts[2:]))
        return None
