"""Takes a submitted pod of `mgpu simulate` through the webhooks, in the order in which the API server calls them.

A pod is mutated, then converted to claims where that is enabled (docs/dra-convert.md), then marked if it uses claims,
and validated at last. `pipeline` calls `admit`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonpatch

from mgpu.model.compute_resources import requests_of
from mgpu.model.converted_requests import CONVERTED, claim_template, read_converted
from mgpu.model.errors import BadObject, Problem
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import QuantityError
from mgpu.settings import Settings
from playground.simulate.claim_files import pod_problems
from playground.simulate.documents import Raw
from webhook.claim_mark import mark
from webhook.pod_conversion import convert
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create

_LABEL = "mgpu.io/dra"


@dataclass(frozen=True, slots=True)
class Admission:
    """The result of the webhooks.

    Attributes:
        raw: The pod as the webhooks change it.
        pod: The same pod, parsed.
        patch: The JSON Patch of all webhooks together.
        denied: The problems for which the pod is denied.
        template: The ResourceClaimTemplate that the scheduler creates for a converted pod, or None.
    """

    raw: Raw
    pod: Pod
    patch: list[Raw]
    denied: list[Problem]
    template: Raw | None = None


def admit(raw: Raw, settings: Settings) -> Admission:
    """Return what becomes of a pod at its admission."""
    patch: list[Raw] = []

    def change(operations: Iterable[Mapping[str, Any]]) -> None:
        nonlocal raw
        found = [dict(operation) for operation in operations]
        patch.extend(found)
        raw = jsonpatch.apply_patch(raw, found)

    denied: list[Problem] = []
    template: Raw | None = None
    change(mutate(raw, settings).patch)
    # The files have no Namespaces, so only the label of the pod counts.
    if settings.dra.convert and (raw["metadata"].get("labels") or {}).get(_LABEL) == "convert":
        try:
            change(convert(raw, settings).patch)
            template = _template(raw)
        except BadObject as error:
            denied = list(error.problems)
    change(mark(raw))
    denied = denied or pod_problems(raw) or validate_create(raw, settings) or amount_problems(raw)
    return Admission(raw, read_pod(raw), patch, denied, template)


def _template(raw: Raw) -> Raw | None:
    annotation = (raw["metadata"].get("annotations") or {}).get(CONVERTED)
    return None if annotation is None else claim_template(read_converted(annotation), raw["metadata"]["namespace"])


def amount_problems(raw: Raw) -> list[Problem]:
    """Return the problem of the first amount that the API server would reject, or an empty list."""
    try:
        requests_of(raw)
    except QuantityError as error:
        return [Problem("spec.containers", str(error))]
    return []
