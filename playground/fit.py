"""Decides whether a pod fits a node, as kube-scheduler's filter plugins do. Cards are not considered.

The functions are pure and work on API objects as JSON. They consider unschedulable nodes, taints, nodeSelector,
required node affinity, the requested resources and the number of pods. They do not consider ports, volumes, pod
affinity and topology spread constraints. The playground's scheduling loop, its kubelet and `mgpu simulate` call `fits`.
The scheduling loop also calls `message` and `as_event`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mgpu.model.compute_resources import Requests, allocatable, requests_of

Raw = Mapping[str, Any]

_VERB = re.compile(r"%[-+# 0]*\d*(?:\.\d*)?(.?)", re.DOTALL)
"""A formatting directive of Go's Sprintf, such as `%5d`. The group is its verb, or "" at the end of the text."""
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "value": "", "effect": "NoSchedule"}


def fits(pod: Raw, node: Raw, used: Requests, counted: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the reasons why a pod does not fit a node, in kube-scheduler's words, or an empty list if it fits.

    As in kube-scheduler, only the first plugin that rejects the node gives its reasons.

    Args:
        pod: The pod.
        node: The node.
        used: The sum of `requests_of` over the pods on the node, with the number of these pods as `pods`.
        counted: Returns whether the amount of a resource, or of `pods`, is checked. kube-scheduler does not check the
            resources that an extender manages with `ignoredByScheduler`.
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
    """Return kube-scheduler's message for a pod that fits no node.

    An example is `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were unschedulable.`

    Args:
        reasons: The reasons of each node that rejects the pod.
        nodes: The number of all nodes.
    """
    counts = Counter(reason for found in reasons.values() for reason in dict.fromkeys(found))
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
    return f"0/{nodes} nodes are available: {listed}." if listed else f"0/{nodes} nodes are available."


def as_event(text: str) -> str:
    """Return a message as it appears in kube-scheduler's Event.

    kube-scheduler passes the message to Go's Sprintf as the format, without arguments. So Sprintf replaces `% o` in
    `100% of` by `%!o(MISSING)`.
    """
    return _VERB.sub(
        lambda verb: f"%!{verb[1]}(MISSING)" if verb[1] not in ("%", "") else verb[1] or "%!(NOVERB)", text
    )


def _short_of(wanted: Requests, node: Raw, used: Requests, counted: Callable[[str], bool]) -> list[str]:
    """Return a reason for each resource of which the node has too little free."""
    there = allocatable(node)
    return [
        "Too many pods" if name == "pods" else f"Insufficient {name}"
        for name in sorted(wanted, key=lambda name: (name != "pods", name))
        if wanted[name] and counted(name) and used.get(name, 0) + wanted[name] > there.get(name, 0)
    ]


def _untolerated(node: Raw, tolerations: Iterable[Raw]) -> Raw | None:
    """Return the node's first taint that keeps the pod away, or None."""
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
    return required is None or selector_matches(required, node)


def selector_matches(selector: Raw, node: Raw) -> bool:
    """Return whether a NodeSelector, such as that of an allocated ResourceClaim, matches a node."""
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    return any(_term(term, labels, fields) for term in selector.get("nodeSelectorTerms") or ())


def _term(term: Raw, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Return whether a NodeSelectorTerm matches a node. An empty term matches no node."""
    expressions, by_field = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not by_field:
        return False
    return all(_expression(e, labels) for e in expressions) and all(_expression(e, fields) for e in by_field)


def _expression(expression: Raw, found: Mapping[str, str]) -> bool:
    """Return whether a NodeSelectorRequirement matches these labels or fields."""
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
    """Return whether `value` is greater than the first of `values`, or less if `greater` is false.

    Return False if one of the two is not a whole number.
    """
    try:
        here, bound = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return here > bound if greater else here < bound
