"""The admission of Bindings: the cards are decided in the write that gives a pod its node.

Source: docs/design/kubernetes.md, "Binding".

It sees every binding of the cluster, and nothing in a Binding says whether its pod asks for GPU.

With `scheduler.bindingUsers` it takes over the bindings of GPU pods (docs/design/koordinator.md, "Upgrade webhook"):
anybody else's are refused. Only while it is asked: `failurePolicy: Ignore` lets every binding pass in an outage, and
such a pod gets its cards late, on the node where it is.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

from mgpu import dialects
from mgpu.model import budget
from mgpu.model.gpu_requests import Rejection
from mgpu.serving.review import BadRequest, Reply, Review, allow, deny, pointer
from mgpu.settings import SchedulerSettings
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budget import Gone, Rationed, never

log = logging.getLogger(__name__)

_REFUSED = 409
"""client-go retries 429 and 5xx on the same node; 409 makes the scheduler think again."""
_FORBIDDEN = 403
_NO_SUCH_POD = 404


class BindingAdmission:
    """may_decide raises RetryLater while this process must not decide: then `failurePolicy` lets the binding pass, and
    the pod is decided late. users: the users or groups that may bind GPU pods; empty: anybody. caller: of the request
    at hand, whether it waits no more.
    """

    def __init__(
        self,
        decider: Decider,
        may_decide: Callable[[], None],
        users: Collection[str] = (),
        caller: Callable[[], Gone] = lambda: never,
    ) -> None:
        self._decider, self._may_decide, self._users = decider, may_decide, frozenset(users)
        self._caller = caller

    def __call__(self, review: Review) -> Reply:
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
        # `bindings` ignores the uid that it is given, so there a pod of the same name must not be mistaken for it.
        live = review.resource == "bindings"
        uid, known = self._decider.find(review.namespace, name, _text(meta, "uid"), live=live)
        if not uid and review.dry_run:  # the API server would refuse it too; so `mgpu doctor` sees who is asked
            return deny(review, f"there is no pod {review.namespace}/{name}", _NO_SUCH_POD)
        if known is None or known.pod.node:
            return allow(review)  # no GPU pod; or no such pod, or bound already: the API server's to refuse
        if self._users and self._users.isdisjoint((review.user, *review.groups)):
            log.warning("binding refused: %s may not bind GPU pods", review.user, extra={"pod": uid, "node": node})
            return deny(review, _not_theirs(review.user), _FORBIDDEN)
        if known.request is None:
            return deny(review, known.problems, _REFUSED)
        try:
            decision = self._decider.decide(known, node, reserve=not review.dry_run, gone=self._caller())
        except Rationed as error:
            # Denied rather than unanswered, so that the scheduler tries again, on whatever node is best by then.
            return deny(review, f"no cards for this pod on {node}: {error}", _REFUSED)
        if isinstance(decision, Rejection):
            log.info("binding refused: %s", decision, extra={"pod": uid, "node": node})
            return deny(review, f"no cards for this pod on {node}: {decision}", _REFUSED)
        self._may_decide()  # the process may have been stopped since it was asked, and another replica leads by now
        return allow(review, _patch(binding, uid, dict(decision.annotations)))


def binding_users(own: SchedulerSettings) -> Collection[str]:
    """Return the users and groups that may bind GPU pods; none where anybody may.

    The kube-scheduler of components/second-scheduler had the account of mgpu's process before it got its own. A setting
    that names that account still means the kube-scheduler of mgpu's pod.
    """
    accounts = f"system:serviceaccount:{own.namespace}:"
    if own.kube_scheduler_lease and f"{accounts}mgpu-scheduler" in own.binding_users:
        return (*own.binding_users, f"{accounts}mgpu-kube-scheduler")
    return own.binding_users


def _not_theirs(user: str) -> str:
    return (
        f"{user or 'an unnamed user'} may not bind GPU pods: the setting scheduler.bindingUsers names neither this "
        "user nor a group of it; let the pod's schedulerName name a scheduler that may, or add this one to the setting"
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
    """What turns the Binding into one of this very pod with these annotations, and with none of ours that are not."""
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
    patch += [{"op": "remove", "path": pointer("metadata", "annotations", key)} for key in strange]
    return patch + [
        {"op": "add", "path": pointer("metadata", "annotations", key), "value": value}
        for key, value in sorted(annotations.items())
    ]
