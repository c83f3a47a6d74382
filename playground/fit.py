"""kube-scheduler's filter plugins as pure functions over API JSON: which nodes a pod fits by everything but cards.

Covered: unschedulable nodes, taints, nodeSelector and required node affinity, requests against allocatable, pod count.
Left out: ports, volumes, pod affinity, topology spread. The scheduling loop, the kubelet's admission and
`mgpu simulate` call `fits`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mgpu.model.compute_resources import Requests, allocatable, requests_of

Raw = Mapping[str, Any]

_VERB = re.compile(r"%[-+# 0]*\d*(?:\.\d*)?(.?)", re.DOTALL)
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "value": "", "effect": "NoSchedule"}


def fits(pod: Raw, node: Raw, used: Requests, counted: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return why `pod` does not fit `node`, in kube-scheduler's words; empty where it fits.

    As in kube-scheduler, only the first plugin that refuses gives its reasons.

    Args:
        used: the sum of `requests_of` over the pods on the node, with their number as `pods`.
        counted: whether a resource (or `pods`) is compared; an extender may ask to ignore its own.
    """
    spec = pod.get("spec") or {}
    tolerations = spec.get("tolerations") or ()
    if (node.get("spec") or {}).get("unschedulable") and not _tolerated(_UNSCHEDULABLE, tolerations):
        return ["node(s) were unschedulable"]
    taint = _untolerated(node, tolerations)
    if taint is not None:
        return [f"node(s) had untolerated taint {{{taint.get('key', '')}: {taint.get('value') or ''}}}"]
    if not _selected(spec, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    return _short_of(requests_of(pod), node, used, counted)


def message(reasons: Mapping[str, Sequence[str]], nodes: int) -> str:
    """Return `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were unschedulable.` for the reasons by node."""
    counts = Counter(reason for found in reasons.values() for reason in dict.fromkeys(found))
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
    return f"0/{nodes} nodes are available: {listed}." if listed else f"0/{nodes} nodes are available."


def as_event(text: str) -> str:
    """Return what kube-scheduler's Event makes of a message: it passes through Go's Sprintf once more."""
    return _VERB.sub(
        lambda verb: f"%!{verb[1]}(MISSING)" if verb[1] not in ("%", "") else verb[1] or "%!(NOVERB)", text
    )


def _short_of(wanted: Requests, node: Raw, used: Requests, counted: Callable[[str], bool]) -> list[str]:
    there = allocatable(node)
    return [
        "Too many pods" if name == "pods" else f"Insufficient {name}"
        for name in sorted(wanted, key=lambda name: (name != "pods", name))
        if wanted[name] and counted(name) and used.get(name, 0) + wanted[name] > there.get(name, 0)
    ]


def _untolerated(node: Raw, tolerations: Iterable[Raw]) -> Raw | None:
    taints: Iterable[Raw] = (node.get("spec") or {}).get("taints") or ()
    return next(
        (
            taint
            for taint in taints
            if taint.get("effect") in ("NoSchedule", "NoExecute") and not _tolerated(taint, tolerations)
        ),
        None,
    )


def _tolerated(taint: Raw, tolerations: Iterable[Raw]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: Raw, taint: Raw) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if (toleration.get("operator") or "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")


def _selected(spec: Raw, node: Raw) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    fields = {"metadata.name": node["metadata"]["name"]}
    return any(_term(term, labels, fields) for term in required.get("nodeSelectorTerms") or ())


def _term(term: Raw, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Return whether a NodeSelectorTerm matches; an empty term matches nothing."""
    expressions, by_field = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not by_field:
        return False
    return all(_expression(e, labels) for e in expressions) and all(_expression(e, fields) for e in by_field)


def _expression(expression: Raw, found: Mapping[str, str]) -> bool:
    value, values = found.get(expression["key"]), expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            return _compared(value, values, greater=operator == "Gt")
        case _:
            return False


def _compared(value: str | None, values: Sequence[str], *, greater: bool) -> bool:
    try:
        here, bound = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return here > bound if greater else here < bound
