"""Calls one admission webhook over TLS and reads its answer, with the real server's words for what goes wrong."""

import asyncio
import base64
import binascii
import ssl
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from playground.apiserver.attributes import Attributes
from playground.apiserver.errors import ApiError
from playground.apiserver.storage import Object

ServiceResolver = Callable[[str, str, int], tuple[str, int]]
_MAX_ANSWER = 3 * 1024 * 1024


class CallFailed(Exception):
    """The webhook could not be asked, or its answer makes no sense. `failurePolicy` decides what follows."""


def denial(name: str, result: Object | None) -> ApiError:
    """The Status for a request that the webhook `name` refused."""
    status = dict(result or {})
    code = status.get("code") or 0
    denied = f'admission webhook "{name}" denied the request'
    if status.get("message"):
        message = f"{denied}: {status['message']}"
    elif status.get("reason"):
        message = f"{denied}: {status['reason']}"
    else:
        message = f"{denied} without explanation"
    return ApiError(code if code >= 400 else 400, status.get("reason") or "", message, status.get("details"))


class WebhookClient:
    """Keeps connections and TLS contexts. `resolver` maps a Service (namespace, name, port) to host and port."""

    def __init__(self, resolver: ServiceResolver | None) -> None:
        self._resolver = resolver
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def call(self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> Object:
        """The `response` of the review. Raises CallFailed."""
        uid = str(uuid.uuid4())
        body = orjson.dumps(attrs.review(uid, obj, old))
        seconds = hook.get("timeoutSeconds") or 10
        answer = await self._post(hook, body, seconds)
        response = answer.get("response") if isinstance(answer, dict) else None
        if not isinstance(response, dict):
            raise CallFailed("received invalid webhook response: webhook response was absent")
        if answer.get("kind") != "AdmissionReview" or answer.get("apiVersion") != "admission.k8s.io/v1":
            got = f"/{answer.get('apiVersion', '')}, Kind={answer.get('kind', '')}"
            raise CallFailed(
                f"received invalid webhook response: expected webhook response of admission.k8s.io/v1, "
                f"Kind=AdmissionReview, got {got}"
            )
        if response.get("uid") != uid:
            got = response.get("uid") or ""
            raise CallFailed(f'received invalid webhook response: expected response.uid="{uid}", got "{got}"')
        if response.get("patch") and response.get("patchType") != "JSONPatch":
            raise CallFailed("received invalid webhook response: webhook returned response.patch but no JSONPatch")
        return response

    async def _post(self, hook: Object, body: bytes, seconds: int) -> Any:
        url, server_name = self._target(hook["clientConfig"])
        shown = f'failed to call webhook: Post "{hook["clientConfig"].get("url") or url}?timeout={seconds}s"'
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Content-Type": "application/json"})
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.post(
                    url,
                    data=body,
                    params={"timeout": f"{seconds}s"},
                    ssl=self._context(hook["clientConfig"].get("caBundle") or ""),
                    server_hostname=server_name,
                    allow_redirects=False,
                ) as answer,
            ):
                text = await answer.content.read(_MAX_ANSWER)
        except TimeoutError as problem:
            raise CallFailed(f"{shown}: context deadline exceeded") from problem
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as problem:
            raise CallFailed(f"{shown}: tls: failed to verify certificate: {problem}") from problem
        except aiohttp.ClientError as problem:
            raise CallFailed(f"{shown}: {problem}") from problem
        if not 200 <= answer.status < 300:
            raise CallFailed(_http_failure(answer.status, text))
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as problem:
            raise CallFailed(f"failed to call webhook: couldn't decode the answer: {problem}") from problem

    def _target(self, config: Object) -> tuple[str, str | None]:
        """(URL, the name that the certificate must have). Raises CallFailed for a service that nobody knows."""
        if url := config.get("url"):
            return url, None
        service = config["service"]
        namespace, name = service["namespace"], service["name"]
        path = (service.get("path") or "/").lstrip("/")
        if self._resolver is None:
            raise CallFailed(f'failed to call webhook: service "{name}" not found')
        try:
            host, port = self._resolver(namespace, name, service.get("port") or 443)
        except LookupError as problem:
            raise CallFailed(f'failed to call webhook: service "{name}" not found') from problem
        return f"https://{host}:{port}/{path}", f"{name}.{namespace}.svc"

    def _context(self, bundle: str) -> ssl.SSLContext:
        if bundle not in self._contexts:
            try:
                authority = base64.b64decode(bundle).decode("ascii") if bundle else None
                self._contexts[bundle] = ssl.create_default_context(cadata=authority)
            except (binascii.Error, UnicodeDecodeError, ssl.SSLError) as problem:
                raise CallFailed("failed to call webhook: unable to load root certificates") from problem
        return self._contexts[bundle]


def _http_failure(status: int, text: bytes) -> str:
    if status == 404:
        return "failed to call webhook: the server could not find the requested resource"
    shown = text[:200].decode("utf-8", "replace").strip()
    if status >= 500:
        return f'failed to call webhook: an error on the server ("{shown}") has prevented the request from succeeding'
    return f"failed to call webhook: the server rejected our request: {status} {shown}"
