"""Handles the admission of Bindings: the cards are decided in the same write that binds a pod to its node.

The API server calls `/bind-admission` for every Binding of the cluster, because a Binding does not tell whether its pod
requests GPUs (docs/design/kubernetes.md, "Binding"). If mgpu does not answer within one second, `failurePolicy: Ignore`
lets the binding pass, and a late binding decision chooses the cards.

With `scheduler.bindingUsers` only the named users may bind GPU pods (docs/design/koordinator.md, "Upgrade webhook").
This is enforced only while the webhook is reachable. `scheduler.api.app` serves `BindingAdmission`.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

from mgpu import dialects
from mgpu.model import budget
from mgpu.model.gpu_requests import Rejection
from mgpu.serving.review import BadRequest, Reply, Review, allow, deny, json_pointer
from mgpu.settings import SchedulerSettings
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never

log = logging.getLogger(__name__)

_REFUSED = 409
"""The status of a denial. After a 409 the scheduler chooses a node again. After 429 and 5xx client-go would retry with
the same node."""
_FORBIDDEN = 403
_NO_SUCH_POD = 404


class BindingAdmission:
    """Decides the cards of the pod that a Binding names, and patches the allocation record into the Binding.

    Args:
        may_decide: Raises RetryLater while this replica must not decide.
        users: The users and groups that may bind GPU pods. If `users` is empty, everyone may.
        caller: Returns, for the current request, a function that returns whether the client has given up.
        refusal: Returns why a member of a gang must not be bound to a node now (`GangFilter.refusal`).
    """

    def __init__(
        self,
        decider: Decider,
        may_decide: Callable[[], None],
        users: Collection[str] = (),
        caller: Callable[[], CallerGone] = lambda: never,
        refusal: Callable[[GpuPod, str], Rejection | None] = lambda _pod, _node: None,
    ) -> None:
        self._decider = decider
        self._may_decide = may_decide
        self._users = frozenset(users)
        self._caller = caller
        self._refusal = refusal

    def __call__(self, review: Review) -> Reply:
        """Allow the Binding, with a patch if cards were decided, or deny it with the reason.

        Raises:
            BadRequest: The Binding is malformed.
            RetryLater: No decision is possible now, for example because this replica does not lead.
        """
        binding = review.object
        if binding is None or review.operation != "CREATE" or review.resource not in ("pods/binding", "bindings"):
            return allow(review)
        if large := budget.excess(binding):
            return deny(review, large)
        meta, target = _table(binding, "metadata"), _table(binding, "target")
        name, node = review.name or _text(meta, "name"), _text(target, "name")
        if target.get("kind") not in ("Node", "", None) or not name or not node:
            return allow(review)
        self._may_decide()
        # The API server ignores the UID of a POST to `bindings`. For such a Binding the pod is read from the API
        # server, because the cache may still have an older pod of the same name.
        live = review.resource == "bindings"
        found = self._decider.find(review.namespace, name, _text(meta, "uid"), live=live)
        if found is None and review.dry_run:
            # The API server would reject this binding too. This reply shows `mgpu doctor` that the webhook is called.
            return deny(review, f"there is no pod {review.namespace}/{name}", _NO_SUCH_POD)
        if found is not None and not live and self._decider.needs_claim(found.gpu_pod, node):
            # kube-scheduler has written the claim into the pod's status just before this binding.
            found = self._decider.find(review.namespace, name, found.uid, live=True)
        gpu_pod = found and found.gpu_pod
        if gpu_pod is None or gpu_pod.pod.node:
            # The pod is not a GPU pod, or it is bound already and the API server itself rejects this binding.
            return allow(review)
        uid = gpu_pod.pod.uid
        if self._users and self._users.isdisjoint((review.user, *review.groups)):
            log.warning("binding rejected: %s may not bind GPU pods", review.user, extra={"pod": uid, "node": node})
            return deny(review, _forbidden_text(review.user), _FORBIDDEN)
        if gpu_pod.request is None:
            return deny(review, gpu_pod.problems, _REFUSED)
        try:
            refused = None if review.dry_run else self._refusal(gpu_pod, node)
            decision = refused or self._decider.decide(gpu_pod, node, reserve=not review.dry_run, gone=self._caller())
        except EffortExceeded as error:
            # After a 503 client-go would retry with this node. After a denial the scheduler chooses a node again.
            return deny(review, f"no cards for this pod on {node}: {error}", _REFUSED)
        if isinstance(decision, Rejection):
            log.info("binding rejected: %s", decision, extra={"pod": uid, "node": node})
            return deny(review, f"no cards for this pod on {node}: {decision}", _REFUSED)
        # This is checked again, because the process may have been suspended and another replica may lead by now.
        self._may_decide()
        return allow(review, _patch(binding, uid, dict(decision.annotations)))


def binding_users(own: SchedulerSettings) -> Collection[str]:
    """Return the users and groups that may bind GPU pods; empty if everyone may.

    If `scheduler.bindingUsers` names the service account of mgpu-scheduler and `kubeSchedulerLease` is set, the
    kube-scheduler of components/second-scheduler may bind GPU pods too. In older settings the account of mgpu-scheduler
    stands for both.
    """
    accounts = f"system:serviceaccount:{own.namespace}:"
    if own.kube_scheduler_lease and f"{accounts}mgpu-scheduler" in own.binding_users:
        return (*own.binding_users, f"{accounts}mgpu-kube-scheduler")
    return own.binding_users


def _forbidden_text(user: str) -> str:
    return (
        f"{user or 'an unnamed user'} may not bind GPU pods: the setting scheduler.bindingUsers names neither this "
        "user nor one of its groups; let another scheduler bind the pod (schedulerName), or add this user to the list"
    )


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(400, f"request.object.{key} must be an object")
    return value or {}


def _text(table: dict[str, Any], key: str) -> str:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(400, f"{key} must be a string")
    return value or ""


def _patch(binding: dict[str, Any], uid: str, annotations: dict[str, str]) -> list[dict[str, Any]]:
    """Return the JSON Patch that adds a missing UID and the annotations, and removes other placement annotations."""
    meta = binding.get("metadata")
    if not isinstance(meta, dict):
        return [{"op": "add", "path": "/metadata", "value": {"uid": uid, "annotations": annotations}}]
    patch: list[dict[str, Any]] = []
    if not meta.get("uid"):
        patch.append({"op": "add", "path": "/metadata/uid", "value": uid})
    present = meta.get("annotations")
    if not isinstance(present, dict):
        return [*patch, {"op": "add", "path": "/metadata/annotations", "value": annotations}]
    strange = sorted(key for key in present if dialects.is_placement_annotation(key) and key not in annotations)
    patch += [{"op": "remove", "path": json_pointer("metadata", "annotations", key)} for key in strange]
    return patch + [
        {"op": "add", "path": json_pointer("metadata", "annotations", key), "value": value}
        for key, value in sorted(annotations.items())
    ]
