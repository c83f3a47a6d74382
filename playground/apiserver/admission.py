"""Admission: mutating webhooks one after another, then the validating ones together."""

import asyncio
import base64
import binascii
from collections.abc import Callable
from typing import Any

import jsonpatch
import jsonpointer
import orjson

from playground.apiserver.attributes import Attributes
from playground.apiserver.conditions import conditions_hold
from playground.apiserver.errors import bad_request, internal
from playground.apiserver.matching import hook_fits
from playground.apiserver.patches import json_patch
from playground.apiserver.storage import Object, Storage
from playground.apiserver.webhooks import CallFailed, WebhookClient, denial

_GROUP = "admissionregistration.k8s.io"
MUTATING, VALIDATING = f"mutatingwebhookconfigurations.{_GROUP}", f"validatingwebhookconfigurations.{_GROUP}"
Normalise = Callable[[Object], Object]


class Admission:
    """`normalise` is applied to what a webhook made of an object, as the real server decodes and defaults it again."""

    def __init__(self, storage: Storage, client: WebhookClient) -> None:
        self._storage, self._client = storage, client

    async def mutate(self, attrs: Attributes, obj: Object | None, old: Object | None, normalise: Normalise) -> Any:
        """The object after all mutating webhooks (None stays None). Raises ApiError."""
        hooks = self._hooks(MUTATING, attrs)
        changed_by = -1
        for i, hook in enumerate(hooks):
            before = obj
            obj = await self._mutate_once(hook, attrs, obj, old, normalise)
            if obj != before:
                changed_by = i
        for hook in hooks[: max(changed_by, 0)]:
            if hook.get("reinvocationPolicy") == "IfNeeded":
                obj = await self._mutate_once(hook, attrs, obj, old, normalise)
        return obj

    async def validate(self, attrs: Attributes, obj: Object | None, old: Object | None) -> None:
        """Raises the first refusal, in the order of the configurations."""
        fitting = [h for h in self._hooks(VALIDATING, attrs) if self._fits(h, attrs, obj, old)]
        hooks = [h for h in fitting if conditions_hold(h, attrs, obj, old)]
        results = await asyncio.gather(*(self._ask(h, attrs, obj, old) for h in hooks), return_exceptions=True)
        for hook, result in zip(hooks, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            if result is not None and not result.get("allowed"):
                raise denial(hook["name"], result.get("status"))

    async def _mutate_once(
        self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None, normalise: Normalise
    ) -> Object | None:
        if not self._fits(hook, attrs, obj, old) or not conditions_hold(hook, attrs, obj, old):
            return obj
        response = await self._ask(hook, attrs, obj, old)
        if response is None:
            return obj
        if not response.get("allowed"):
            raise denial(hook["name"], response.get("status"))
        patch = self._patch_of(hook, response)
        return normalise(_patched(obj, patch)) if patch and obj is not None else obj

    async def _ask(self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> Object | None:
        """The webhook's response; None where its failure is to be ignored. Raises ApiError."""
        name = hook["name"]
        if attrs.dry_run and hook.get("sideEffects") not in ("None", "NoneOnDryRun"):
            raise bad_request(f'admission webhook "{name}" does not support dry run')
        try:
            response = await self._client.call(hook, attrs, obj, old)
        except CallFailed as problem:
            return self._failed(hook, str(problem))
        attrs.warnings.extend(response.get("warnings") or [])
        return response

    def _patch_of(self, hook: Object, response: Object) -> list[Object]:
        encoded = response.get("patch")
        if not encoded:
            return []
        try:
            patch: list[Object] = orjson.loads(base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError) as problem:
            raise internal(f'failed calling webhook "{hook["name"]}": {problem}') from problem
        return patch

    @staticmethod
    def _failed(hook: Object, why: str) -> None:
        """Refuses the request unless the webhook's failures are ignored."""
        if hook.get("failurePolicy") != "Ignore":
            raise internal(f'failed calling webhook "{hook["name"]}": {why}')

    def _hooks(self, resource: str, attrs: Attributes) -> list[Object]:
        if attrs.group == _GROUP:
            return []
        items = self._storage.collection(resource).items
        return [hook for key in sorted(items) for hook in items[key].obj.get("webhooks") or []]

    def _fits(self, hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> bool:
        return hook_fits(hook, attrs, obj, old, self._namespace_labels)

    def _namespace_labels(self, name: str) -> dict[str, str]:
        item = self._storage.get("namespaces", "", name)
        return (item.obj["metadata"].get("labels") or {}) if item else {}


def _patched(obj: Object, patch: list[Object]) -> Object:
    try:
        return json_patch(obj, patch)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as problem:
        raise internal(str(problem)) from problem
