"""The webhook's HTTP side: `/mutate` and `/validate` of pods, `/healthz`, `/readyz`."""

import logging
from collections.abc import Callable, Sequence

from flask import Flask

from mgpu.model.errors import Problem
from mgpu.serving.app import new_app, probes, reviewing
from mgpu.serving.review import Reply, Review, allow, deny
from mgpu.settings import Settings
from webhook.mutate import mutate
from webhook.validate import strange_wishes, validate_create, validate_update

_log = logging.getLogger(__name__)


def make_app(settings: Settings, ready: Callable[[], str] = str) -> Flask:
    """The app. `ready`: why it should not be asked yet, "": it should."""

    def mutating(review: Review) -> Reply:
        if review.operation != "CREATE" or review.resource != "pods" or review.object is None:
            return allow(review)
        mutation = mutate(review.object, settings)
        return allow(review, mutation.patch, mutation.warnings)

    def validating(review: Review) -> Reply:
        problems, warnings = _problems(review, settings), _warnings(review)
        if not problems:
            return allow(review, warnings=warnings)
        _log_denial(review, problems)
        return deny(review, problems, code=422 if review.operation == "CREATE" else 403, warnings=warnings)

    app = new_app()
    reviewing(app, "/mutate", mutating, kinds=("Pod",))
    reviewing(app, "/validate", validating, kinds=("Pod",))
    probes(app, ready)
    return app


def _problems(review: Review, settings: Settings) -> Sequence[Problem]:
    if review.object is None:
        return ()
    if review.operation == "CREATE" and review.resource == "pods":
        return validate_create(review.object, settings)
    if review.operation == "UPDATE" and review.old is not None:
        return validate_update(review.object, review.old, review.user, settings)
    return ()


def _warnings(review: Review) -> Sequence[str]:
    if review.object is None or review.operation not in ("CREATE", "UPDATE"):
        return ()
    return strange_wishes(review.object, review.old)


def _log_denial(review: Review, problems: Sequence[Problem]) -> None:
    meta = (review.object or {}).get("metadata") or {}
    fields = {
        "pod": meta.get("uid"),
        "pod_namespace": review.namespace,
        "pod_name": review.name or meta.get("generateName"),
        "operation": review.operation,
        "user": review.user,
        "problems": [str(problem) for problem in problems],
    }
    _log.info("pod denied", extra=fields)
