"""Calls the admission webhooks that are configured for a request, and applies their responses.

Mutating webhooks are called one after another, and validating webhooks at the same time. The error messages follow
those of kube-apiserver. `writes`, `deletions` and `subresources` call the webhooks through `Admission`, and
`strategies` checks their match conditions with `condition_problems`.
"""

import asyncio
import base64
import binascii
import ssl
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import aiohttp
import jsonpatch
import jsonpointer
import orjson
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from playground.apiserver.api_errors import ApiError, Cause, bad_request, forbidden, internal, invalid_value
from playground.apiserver.calls import Attributes
from playground.apiserver.patches import json_patch
from playground.apiserver.selectors import selector_matches
from playground.apiserver.storage import Object, Storage

_GROUP = "admissionregistration.k8s.io"
_MUTATING = f"mutatingwebhookconfigurations.{_GROUP}"
_VALIDATING = f"validatingwebhookconfigurations.{_GROUP}"
_MAX_RESPONSE = 3 * 1024 * 1024
_ENVIRONMENT = cel.NewEnv(
    variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN),
    extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
)

Normalise = Callable[[Object], Object]
"""A function that decodes an object that a webhook has patched, and sets the defaults again."""


class CallFailed(Exception):
    """The call of a webhook failed, or its answer is malformed. `failurePolicy` decides whether the request fails."""


class Admission:
    """Calls the webhooks of the stored configurations. All methods raise ApiError if the request is refused."""

    def __init__(self, storage: Storage, client: "WebhookClient") -> None:
        self._storage = storage
        self._client = client

    async def mutate(self, attrs: Attributes, obj: Object | None, old: Object | None, normalise: Normalise) -> Any:
        """Call the mutating webhooks and return the patched object.

        As in kube-apiserver, a webhook with the `reinvocationPolicy` IfNeeded is called again if a later webhook has
        changed the object. One that was not called the first time is not called then either, even if it would be now.

        Args:
            obj: The object of the request, or None for a deletion. For a deletion the result is None too.
            old: The stored object, or None for a creation.
            normalise: The function that is applied to each patched object.
        """
        hooks = self._hooks(_MUTATING, attrs)
        changed_by = -1
        called = []
        for i, hook in enumerate(hooks):
            before = obj
            called.append(self._concerns(hook, attrs, obj, old))
            obj = await self._mutate_once(hook, attrs, obj, old, normalise)
            if obj != before:
                changed_by = i
        for i, hook in enumerate(hooks[: max(changed_by, 0)]):
            if called[i] and hook.get("reinvocationPolicy") == "IfNeeded":
                obj = await self._mutate_once(hook, attrs, obj, old, normalise)
        return obj

    async def validate(self, attrs: Attributes, obj: Object | None, old: Object | None) -> None:
        """Call the validating webhooks at the same time. If several refuse, raise the refusal of the first one."""
        hooks = [h for h in self._hooks(_VALIDATING, attrs) if self._concerns(h, attrs, obj, old)]
        results = await asyncio.gather(*(self._call(h, attrs, obj, old) for h in hooks), return_exceptions=True)
        for hook, result in zip(hooks, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            if result is not None and not result.get("allowed"):
                raise _denial(hook["name"], result.get("status"))

    async def _mutate_once(
        self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None, normalise: Normalise
    ) -> Object | None:
        if not self._concerns(hook, attrs, obj, old):
            return obj
        response = await self._call(hook, attrs, obj, old)
        if response is None:
            return obj
        if not response.get("allowed"):
            raise _denial(hook["name"], response.get("status"))
        patch = _patch_of(hook, response)
        if not patch or obj is None:
            return obj
        try:
            patched = json_patch(obj, patch)
        except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as problem:
            raise internal(str(problem)) from problem
        return normalise(patched)

    async def _call(self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> Object | None:
        """Return the webhook's response, or None if the call failed and the `failurePolicy` ignores that."""
        name = hook["name"]
        if attrs.dry_run and hook.get("sideEffects") not in ("None", "NoneOnDryRun"):
            raise bad_request(f'admission webhook "{name}" does not support dry run')
        try:
            response = await self._client.call(hook, attrs, obj, old)
        except CallFailed as problem:
            if hook.get("failurePolicy") == "Ignore":
                return None
            raise internal(f'failed calling webhook "{name}": {problem}') from problem
        attrs.warnings.extend(response.get("warnings") or [])
        return response

    def _hooks(self, resource: str, attrs: Attributes) -> list[Object]:
        """Return the webhooks of all configurations of one resource, in the order of the configurations' names.

        No webhook is called for configurations of webhooks, because a broken webhook must not prevent its own repair.
        """
        if attrs.group == _GROUP:
            return []
        items = self._storage.collection(resource).items
        return [hook for key in sorted(items) for hook in items[key].obj.get("webhooks") or []]

    def _concerns(self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> bool:
        """Return whether the rules, the selectors and the match conditions of a webhook all match the request."""
        if not any(_rule_matches(rule, attrs) for rule in hook.get("rules") or []):
            return False
        selector = hook.get("objectSelector")
        if not any(o is not None and selector_matches(selector, _labels(o)) for o in (obj, old)):
            return False
        if not self._in_namespace(hook, attrs, obj or old):
            return False
        return _conditions_hold(hook, attrs, obj, old)

    def _in_namespace(self, hook: Object, attrs: Attributes, obj: Object | None) -> bool:
        if attrs.plural == "namespaces" and not attrs.group:
            labels = _labels(obj)
        elif attrs.namespace:
            item = self._storage.get("namespaces", "", attrs.namespace)
            labels = _labels(item.obj if item else None)
        else:
            return True
        return selector_matches(hook.get("namespaceSelector"), labels)


def _rule_matches(rule: Object, attrs: Attributes) -> bool:
    scope = rule.get("scope") or "*"
    return (
        any(o in ("*", attrs.operation) for o in rule.get("operations") or [])
        and any(g in ("*", attrs.group) for g in rule.get("apiGroups") or [])
        and any(v in ("*", attrs.version) for v in rule.get("apiVersions") or [])
        and any(_resource_matches(r, attrs.plural, attrs.subresource) for r in rule.get("resources") or [])
        and (scope == "*" or (scope == "Namespaced") is attrs.namespaced)
    )


def _resource_matches(pattern: str, plural: str, subresource: str) -> bool:
    resource, _, sub = pattern.partition("/")
    if pattern in ("*", "*/*"):
        return pattern == "*/*" or not subresource
    return resource in ("*", plural) and sub in ("*", subresource)


def _labels(obj: Object | None) -> dict[str, str]:
    return ((obj or {}).get("metadata") or {}).get("labels") or {}


@lru_cache(maxsize=256)
def _compiled(expression: str) -> Any:
    """Compile a CEL expression over the variables `object`, `oldObject` and `request`.

    The variable `authorizer` of kube-apiserver is missing. Raises RuntimeError if the expression does not compile.
    """
    return _ENVIRONMENT.compile(expression)


def condition_problems(hook: Object, path: str) -> Iterator[Cause]:
    """Yield a cause for each match condition of a webhook that does not compile.

    Args:
        path: The field path of the webhook, with which the paths of the causes begin.
    """
    for i, condition in enumerate(hook.get("matchConditions") or []):
        expression = condition.get("expression", "")
        try:
            _compiled(expression)
        except RuntimeError as problem:
            where = f"{path}.matchConditions[{i}].expression"
            yield invalid_value(where, expression, f"compilation failed: {problem}")


def _conditions_hold(hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> bool:
    """Return whether all match conditions are true.

    As in kube-apiserver, a false condition skips the webhook even if the evaluation of another condition fails. If none
    is false and one fails, `failurePolicy` decides: with Ignore the webhook is skipped, and with Fail this function
    raises ApiError.
    """
    conditions = hook.get("matchConditions") or []
    if not conditions:
        return True
    known = {"object": obj, "oldObject": old, "request": attrs.review("", None, None)["request"]}
    results = [_compiled(c["expression"]).eval(data=known) for c in conditions]
    if any(r.type() == cel.Type.BOOL and not r.value() for r in results):
        return False
    errors = [str(r) for r in results if r.type() != cel.Type.BOOL]
    if errors and hook.get("failurePolicy") != "Ignore":
        resource = f"{attrs.plural}.{attrs.group}" if attrs.group else attrs.plural
        raise forbidden(resource, attrs.name, "; ".join(errors))
    return not errors


def _denial(name: str, result: Object | None) -> ApiError:
    """Return the error for a request that the webhook `name` refused. `result` is the `status` of its response."""
    status = dict(result or {})
    code = status.get("code") or 0
    explanation = status.get("message") or status.get("reason")
    denied = f'admission webhook "{name}" denied the request'
    message = f"{denied}: {explanation}" if explanation else f"{denied} without explanation"
    return ApiError(code if code >= 400 else 400, status.get("reason") or "", message, status.get("details"))


def _patch_of(hook: Object, response: Object) -> list[Object]:
    """Return the operations of the response's JSON patch. Raises ApiError if the patch cannot be decoded."""
    encoded = response.get("patch")
    if not encoded:
        return []
    try:
        patch: list[Object] = orjson.loads(base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError) as problem:
        raise internal(f'failed calling webhook "{hook["name"]}": {problem}') from problem
    return patch


class WebhookClient:
    """Posts AdmissionReviews to webhooks. Connections and TLS contexts are kept between calls."""

    def __init__(self) -> None:
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def call(self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> Object:
        """Post the review of a request and return the `response` of the answer.

        Raises CallFailed if there is no valid answer.
        """
        uid = str(uuid.uuid4())
        review = await self._post(hook, orjson.dumps(attrs.review(uid, obj, old)), hook.get("timeoutSeconds") or 10)
        response = review.get("response") if isinstance(review, dict) else None
        if not isinstance(response, dict):
            raise CallFailed("received invalid webhook response: webhook response was absent")
        if review.get("kind") != "AdmissionReview" or review.get("apiVersion") != "admission.k8s.io/v1":
            got = f"/{review.get('apiVersion', '')}, Kind={review.get('kind', '')}"
            wanted = "admission.k8s.io/v1, Kind=AdmissionReview"
            raise CallFailed(f"received invalid webhook response: expected webhook response of {wanted}, got {got}")
        if response.get("uid") != uid:
            got = response.get("uid") or ""
            raise CallFailed(f'received invalid webhook response: expected response.uid="{uid}", got "{got}"')
        if response.get("patch") and response.get("patchType") != "JSONPatch":
            raise CallFailed("received invalid webhook response: webhook returned response.patch but no JSONPatch")
        return response

    async def _post(self, hook: Object, body: bytes, seconds: int) -> Any:
        config = hook["clientConfig"]
        if "url" not in config:
            # Services have no addresses here, so `playground.installation` configures mgpu's webhooks with URLs.
            raise CallFailed(f'failed to call webhook: service "{config["service"]["name"]}" not found')
        shown = f'failed to call webhook: Post "{config["url"]}?timeout={seconds}s"'
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Content-Type": "application/json"})
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.post(
                    config["url"],
                    data=body,
                    params={"timeout": f"{seconds}s"},
                    ssl=self._context(config.get("caBundle") or ""),
                    allow_redirects=False,
                ) as response,
            ):
                text = await response.content.read(_MAX_RESPONSE)
        except TimeoutError as problem:
            raise CallFailed(f"{shown}: context deadline exceeded") from problem
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as problem:
            raise CallFailed(f"{shown}: tls: failed to verify certificate: {problem}") from problem
        except aiohttp.ClientError as problem:
            raise CallFailed(f"{shown}: {problem}") from problem
        if not 200 <= response.status < 300:
            raise CallFailed(f"failed to call webhook: {_http_failure(response.status, text)}")
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as problem:
            raise CallFailed(f"failed to call webhook: couldn't decode the answer: {problem}") from problem

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
        return "the server could not find the requested resource"
    shown = text[:200].decode("utf-8", "replace").strip()
    if status >= 500:
        return f'an error on the server ("{shown}") has prevented the request from succeeding'
    return f"the server rejected our request: {status} {shown}"
