"""Serves the proxies for Services and for Pods, and issues and reviews tokens of service accounts.

`mgpu inspect`, `top` and `explain` ask the scheduler and the node agents in this way. `api_server` calls this module.
As in kube-apiserver, the server behind the proxy does not get the credentials of the user, and its certificate is not
verified. Pods are found by the rules of kube-apiserver (`ResourceLocation` in pkg/registry/core/pod/strategy.go, and
`SplitSchemeNamePort` of apimachinery, at commit 008b3652).
"""

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import aiohttp
from aiohttp import web

from mgpu.model.addresses import is_global_unicast, read_peer
from playground.apiserver.api_errors import ApiError, bad_request, method_not_allowed, not_found
from playground.apiserver.authorization import Request
from playground.apiserver.calls import User
from playground.apiserver.storage import Object, Storage

_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_NOT_PASSED_ON = frozenset({"authorization", "host", "connection", "content-length", "transfer-encoding"})
_SECONDS = 30.0
_SCHEMES = ("", "http", "https")
_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class _Token:
    user: str
    audiences: tuple[str, ...]
    until: datetime


@dataclass
class Proxy:
    """The Services and Pods that can be reached, and the tokens that were issued.

    Attributes:
        urls: The URL of each Service, by its namespace and its name as in a path: `https:mgpu-scheduler:443`.
    """

    storage: Storage
    urls: dict[tuple[str, str], str] = field(default_factory=dict)
    _tokens: dict[str, _Token] = field(default_factory=dict)

    def right(self, method: str, path: str, user: User) -> Request | None:
        """Return the right that a request needs, or None if another module handles the request."""
        if path == _REVIEWS:
            return Request(user.name, "create", "authentication.k8s.io", "tokenreviews")
        parts = path.strip("/").split("/")
        if parts[:3] != ["api", "v1", "namespaces"] or len(parts) < 7:
            return None
        namespace, kind, name, sub = parts[3:7]
        if kind in ("services", "pods") and sub == "proxy":
            return Request(user.name, _VERBS.get(method, ""), "", f"{kind}/proxy", namespace, name)
        if (kind, sub, len(parts)) == ("serviceaccounts", "token", 7):
            return Request(user.name, "create", "", "serviceaccounts/token", namespace, name)
        return None

    async def answer(self, request: web.Request, right: Request) -> web.Response:
        """Answer a request that needs this right and that its user may make."""
        if right.resource == "services/proxy":
            return await self._pass_on(request, self._service_url(right))
        if right.resource == "pods/proxy":
            return await self._pass_on(request, self._pod_url(right))
        if request.method != "POST":
            raise method_not_allowed()
        body = await request.json()
        answer = self._review(body) if right.resource == "tokenreviews" else self._issue(body, right)
        return web.json_response(answer, status=201)

    def _issue(self, body: Object, right: Request) -> Object:
        if self.storage.get("serviceaccounts", right.namespace, right.name) is None:
            raise not_found("serviceaccounts", right.name)
        spec = body.get("spec") or {}
        until = datetime.now(UTC) + timedelta(seconds=spec.get("expirationSeconds", 3600))
        token = secrets.token_urlsafe(32)
        user = f"system:serviceaccount:{right.namespace}:{right.name}"
        self._tokens[token] = _Token(user, tuple(spec.get("audiences") or ()), until)
        return {**body, "status": {"token": token, "expirationTimestamp": f"{until:%Y-%m-%dT%H:%M:%SZ}"}}

    def _review(self, body: Object) -> Object:
        spec = body.get("spec") or {}
        token = self._tokens.get(spec.get("token", ""))
        audiences = [one for one in spec.get("audiences") or () if token and one in token.audiences]
        if token is None or token.until < datetime.now(UTC) or not audiences:
            return {**body, "status": {"user": {}, "error": "invalid bearer token"}}
        return {**body, "status": {"authenticated": True, "user": {"username": token.user}, "audiences": audiences}}

    def _service_url(self, right: Request) -> str:
        url = self.urls.get((right.namespace, right.name))
        if url is None:
            raise ApiError(503, "ServiceUnavailable", f'no endpoints available for service "{right.name}"')
        return url

    def _pod_url(self, right: Request) -> str:
        """Return the URL of a Pod, whose name in the path is `NAME`, `NAME:PORT` or `SCHEME:NAME:PORT`."""
        parts = right.name.split(":")
        scheme = parts.pop(0) if len(parts) == 3 else ""
        name, port = (*parts, "")[:2]
        if len(parts) > 2 or not name or scheme not in _SCHEMES:
            raise bad_request(f'invalid pod request "{right.name}"')
        pod = self.storage.get("pods", right.namespace, name)
        if pod is None:
            raise not_found("pods", name)
        listed = (row for c in pod.obj["spec"]["containers"] for row in c.get("ports") or ())
        port = port or str(next((row["containerPort"] for row in listed), ""))
        address = read_peer((pod.obj.get("status") or {}).get("podIP", ""))
        if address is None or not is_global_unicast(address):
            raise bad_request("address not allowed")
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{scheme or 'http'}://{host}{':' + port if port else ''}"

    async def _pass_on(self, request: web.Request, url: str) -> web.Response:
        _, _, rest = request.raw_path.partition("/proxy")
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _NOT_PASSED_ON}
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session,
                session.request(request.method, url + rest, headers=headers, ssl=False) as found,
            ):
                kept = {key: value for key, value in found.headers.items() if key.lower() not in _NOT_PASSED_ON}
                return web.Response(status=found.status, headers=kept, body=await found.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(503, "ServiceUnavailable", f"error trying to reach service: {error}") from error
