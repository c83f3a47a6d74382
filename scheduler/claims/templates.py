"""Creates the ResourceClaimTemplates of converted pods, and removes those that no pod refers to any more.

The webhook has converted such a pod, and has written into its annotation what the template contains
(`mgpu.model.converted_requests`). Kubernetes creates the claim of a pod from the template, and retries while there is
no template. Pods with equal requests in one namespace share a template, so it has no owner. It is removed when no pod
has referred to it for `UNUSED_SECONDS`.

A removal may coincide with the creation of a pod that refers to the template. That is safe: the pod is observed later,
and then has no claim, so the template is created again with the same content. If Kubernetes has created the claim from
its own cache meanwhile, the claim has this content too. For the same reason a removal may follow a list that is
outdated. A template that somebody else has created or changed is neither used as if it were right nor replaced: an
Event on the pod reports it. The content of templates cannot change in Kubernetes, so it is checked once.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Any, NamedTuple

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import pod_reference
from mgpu.model.converted_requests import (
    GENERATED,
    TEMPLATES,
    claim_template,
    is_generated,
    is_same_template,
    template_path,
)
from mgpu.model.errors import RetryLater
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.converted_pods import ConvertedPod
from scheduler.cluster.events import Warn

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.2
"""The interval between two rounds. A round without waiting pods costs nothing."""
UNUSED_SECONDS = 600.0
"""How long no pod must have referred to a template before it is removed. Pods of a Job or a Deployment that are
replaced in this time use the same template."""
LIST_SECONDS = 60.0
"""The interval at which the generated templates are listed."""
RETRY_SECONDS = 5.0
"""The pause after which a template is created again if a pod that needs it still has no claim. Somebody may have
deleted the template, or the create may have failed. Each further pause is twice as long."""
MAX_RETRY_SECONDS = 60.0
_MOST_CREATES = 20
"""The most templates that one round creates, so that those of other namespaces, and new ones, do not wait for long."""

_Key = tuple[str, str]
"""The namespace and the name of a template."""


class _Attempt(NamedTuple):
    """When a template may be created again, and the pause before that."""

    due: float
    pause: float


class ClaimTemplates:
    """Creates and removes templates. One thread calls `work` every `ROUND_SECONDS`.

    Args:
        api: An API client that writes only while this replica leads (`mgpu.kube.fence`).
        warn: Creates an Event of type Warning.
        may_decide: Raises RetryLater while this replica must not decide.
    """

    def __init__(
        self,
        state: ClusterCache,
        api: Api,
        warn: Warn,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._api = api
        self._warn = warn
        self._may_decide = may_decide
        self._clock = clock
        self._tried: dict[_Key, _Attempt] = {}
        self._unused: dict[str, float] = {}  # By UID, since when no pod has referred to the template.
        self._next_list = 0.0

    def work(self) -> None:
        """Create the templates that are missing. Once in a while, remove those that are not used."""
        try:
            self._may_decide()
        except RetryLater:
            self._unused.clear()  # Another replica may lead now, and this one does not observe what is used meanwhile.
            return
        now = self._clock()
        wanted: dict[_Key, ConvertedPod] = {}
        for pod in self._state.claims.converted_pods():
            wanted.setdefault((pod.namespace, pod.converted.template_name), pod)
        self._tried = {key: one for key, one in self._tried.items() if key in wanted or now < one.due}
        for key in self._next(wanted, now):
            before = self._tried.get(key)
            pause = RETRY_SECONDS if before is None else min(MAX_RETRY_SECONDS, before.pause * 2)
            self._tried[key] = _Attempt(now + pause, pause)
            if not self._create(wanted[key]):
                self._tried[key] = _Attempt(now + RETRY_SECONDS, RETRY_SECONDS)
        if now >= self._next_list:
            self._next_list = now + LIST_SECONDS
            self._remove_unused(now)

    def _next(self, wanted: Iterable[_Key], now: float) -> list[_Key]:
        """Return the templates for this round: those that were never created come first, and namespaces take turns.

        A user chooses how many different templates his pods need, and their creation may fail for ever.
        """
        turns: Counter[tuple[bool, str]] = Counter()
        ordered: list[tuple[bool, int, _Key]] = []
        for key in wanted:
            before = self._tried.get(key)
            if before is None or now >= before.due:
                group = before is not None, key[0]
                ordered.append((group[0], turns[group], key))
                turns[group] += 1
        return [key for *_, key in nsmallest(_MOST_CREATES, ordered)]

    def _create(self, pod: ConvertedPod) -> bool:
        """Create the template of a pod, and return whether the API server has answered."""
        wanted = claim_template(pod.converted, pod.namespace)
        name = pod.converted.template_name
        try:
            self._api.create(template_path(pod.namespace), wanted)
            log.info("template created", extra={"template": name, "pod_namespace": pod.namespace})
        except ApiError as error:
            if error.status == 409:
                self._compare(pod, wanted)
            else:
                text = f"cannot create the ResourceClaimTemplate {name}: {error}"
                self._warn(pod_reference(pod.namespace, pod.name, pod.uid), "MgpuTemplateFailed", text)
        except Unreachable as error:
            log.warning("cannot create template %s: %s", name, error, extra={"pod": pod.uid})
            return False
        return True

    def _compare(self, pod: ConvertedPod, wanted: dict[str, Any]) -> None:
        """Report a template of this name that has another content."""
        name = pod.converted.template_name
        try:
            found = self._api.get(template_path(pod.namespace, name))
        except (ApiError, Unreachable) as error:
            # It was deleted just now, or the next attempt reads it.
            log.debug("cannot read template %s: %s", name, error, extra={"pod": pod.uid})
            return
        if not is_same_template(found, wanted):
            text = (
                f"the ResourceClaimTemplate {name} is not the one that mgpu creates for this pod; delete it, and then "
                f"the pod if it has a claim already"
            )
            self._warn(pod_reference(pod.namespace, pod.name, pod.uid), "MgpuTemplateConflict", text)

    def _remove_unused(self, now: float) -> None:
        try:
            templates, _ = self._api.list(TEMPLATES, labelSelector=f"{GENERATED}=true")
        except (ApiError, Unreachable) as error:
            log.warning("cannot list generated templates: %s", error)
            return
        used = self._state.claims.referred_templates()
        unused = {}
        for raw in filter(is_generated, templates):
            meta = raw["metadata"]
            if (meta["namespace"], meta["name"]) in used:
                continue
            since = self._unused.get(meta["uid"], now)
            if now - since < UNUSED_SECONDS or not self._remove(meta):
                unused[meta["uid"]] = since
        self._unused = unused

    def _remove(self, meta: dict[str, Any]) -> bool:
        """Delete a template, and return whether it is gone."""
        try:
            path = template_path(meta["namespace"], meta["name"])
            options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": meta["uid"]}}
            self._api.delete(path, options)
        except (ApiError, Unreachable) as error:
            if not (isinstance(error, ApiError) and error.status in (404, 409)):
                log.warning("cannot remove template %s: %s", meta["name"], error)
                return False
        # A pod that was created just now may need it again.
        self._tried.pop((meta["namespace"], meta["name"]), None)
        return True
