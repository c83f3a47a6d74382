"""Builds the Flask app of the webhook.

`/mutate`, `/mark-claims`, `/restore`, `/convert`, `/rebuild` and `/validate` review objects, and `/healthz` and
`/readyz` are probes.

`webhook.main` serves the app to the API server. The app must check the size of an object before anything else reads the
object. The paths, the status codes and the structure of denials must not change: the webhook configurations in
`manifests/` contain the paths, and users' programs may read the denials.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flask import Flask

from mgpu.dialects import mtgpu
from mgpu.model import budget
from mgpu.model.errors import MAX_PROBLEMS, Problem, raise_if_any, shorten
from mgpu.model.raw_objects import table_at
from mgpu.serving.app import ReviewObserver, new_app, serve_probes, serve_reviews
from mgpu.serving.review import Reply, Review, allow, deny
from mgpu.settings import Settings
from webhook.claim_mark import mark
from webhook.mtgpupod_rebuild import FindMtgpuPod, is_rebuilt, rebuild
from webhook.mtgpupod_rules import validate_mtgpupod_create, validate_mtgpupod_update
from webhook.pod_conversion import convert, converted_problems, restore
from webhook.pod_mutation import mutate
from webhook.pod_rules import unknown_constraints, validate_create, validate_update

_log = logging.getLogger(__name__)


def make_app(
    settings: Settings,
    observe: ReviewObserver = lambda *_: None,
    find_mtgpupod: FindMtgpuPod | None = None,
) -> Flask:
    """Return the app.

    Args:
        observe: the function that is called with every review and its reply, for the metrics.
        find_mtgpupod: the function that reads an MtgpuPod; None if there is no API server. Without it, new Pods of
            MtgpuPods are denied.
    """

    def review_mutation(review: Review) -> Reply:
        pod = _new_pod(review)
        if pod is None:
            return allow(review)
        mutation = mutate(pod, settings, review.user)
        return allow(review, mutation.patch, mutation.warnings)

    def review_claims(review: Review) -> Reply:
        pod = _new_pod(review)
        return allow(review, mark(pod) if pod is not None else ())

    def review_restoration(review: Review) -> Reply:
        pod = _new_pod(review)
        return allow(review, restore(pod).patch if pod is not None else ())

    def review_conversion(review: Review) -> Reply:
        pod = _new_pod(review)
        if pod is None:
            return allow(review)
        conversion = convert(pod, settings)
        return allow(review, conversion.patch, conversion.warnings)

    def review_rebuild(review: Review) -> Reply:
        pod = _new_pod(review)
        if pod is None or not is_rebuilt(pod, review.user, settings):
            return allow(review)
        return allow(review, rebuild(pod, review.namespace, find_mtgpupod))

    def review_validation(review: Review) -> Reply:
        problems = _problems(review, settings)
        warnings = _warnings(review)
        if not problems:
            return allow(review, warnings=warnings)
        _log_denial(review, problems)
        code = 403 if review.operation == "UPDATE" and review.kind == "Pod" else 422
        return deny(review, problems, code=code, warnings=warnings)

    app = new_app()
    serve_reviews(app, "/mutate", review_mutation, kinds=("Pod",), observe=observe)
    serve_reviews(app, "/mark-claims", review_claims, kinds=("Pod",), observe=observe)
    serve_reviews(app, "/restore", review_restoration, kinds=("Pod",), observe=observe)
    serve_reviews(app, "/convert", review_conversion, kinds=("Pod",), observe=observe)
    serve_reviews(app, "/rebuild", review_rebuild, kinds=("Pod",), observe=observe)
    serve_reviews(app, "/validate", review_validation, kinds=("Pod", mtgpu.KIND), observe=observe)
    serve_probes(app)
    return app


def _new_pod(review: Review) -> dict[str, Any] | None:
    """Return the Pod that is being created, or None if the review is not about the creation of a Pod.

    Raises BadObject if the Pod is too large.
    """
    if review.operation != "CREATE" or review.resource != "pods" or review.object is None:
        return None
    _check_budget(review)
    return review.object


def _check_budget(review: Review) -> None:
    """Raise BadObject if the object is too large. Call it before anything is built from the object."""
    problems = budget.excess(review.object, review.old)
    if review.kind == mtgpu.KIND and review.resource == "mtgpupods":
        problems += budget.excess_of_spec(review.object, review.old)
    raise_if_any(problems)


def _problems(review: Review, settings: Settings) -> Sequence[Problem]:
    if review.object is None:
        return ()
    _check_budget(review)
    if review.kind == mtgpu.KIND:
        return _problems_of_mtgpupod(review, review.object, settings)
    if review.operation == "CREATE" and review.resource == "pods":
        return [*validate_create(review.object, settings, review.user), *converted_problems(review.object, settings)]
    if review.operation == "UPDATE" and review.old is not None:
        return validate_update(review.object, review.old, review.user, settings)
    return ()


def _problems_of_mtgpupod(review: Review, raw: Mapping[str, Any], settings: Settings) -> Sequence[Problem]:
    """Return the rules that an MtgpuPod breaks. The rules do not concern its status, which is a subresource."""
    if review.operation == "CREATE":
        return validate_mtgpupod_create(raw, settings)
    if review.operation == "UPDATE" and review.old is not None and review.resource == "mtgpupods":
        return validate_mtgpupod_update(raw, review.old, settings)
    return ()


def _warnings(review: Review) -> Sequence[str]:
    if review.object is None or review.operation not in ("CREATE", "UPDATE") or review.kind == mtgpu.KIND:
        return ()
    return unknown_constraints(review.object, review.old)


def _log_denial(review: Review, problems: Sequence[Problem]) -> None:
    meta = table_at(review.object, "metadata")
    fields = {
        "pod": meta.get("uid"),
        "pod_namespace": review.namespace,
        "pod_name": review.name or meta.get("generateName"),
        "operation": review.operation,
        "user": review.user,
        "problems": [shorten(str(problem)) for problem in problems[:MAX_PROBLEMS]],
    }
    _log.info("%s denied", review.kind.lower(), extra=fields)
