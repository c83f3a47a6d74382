"""The taints of a node that make the kubelet reject a Pod for good although the Pod names the node itself (`nodeName`).

Only taints with the effect `NoExecute` do this: schedulers apply the other effects, and a Pod with `nodeName` bypasses
the schedulers. `mtgpupod_objects` stores these taints, and `mtgpupods.observation` compares them with tolerations.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mgpu.model.raw_objects import table_at

Raw = Mapping[str, Any]

_TOLERATED_BY_DEFAULT = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The admission plugin DefaultTolerationSeconds makes every Pod tolerate these taints for 5 minutes by default."""


def evicting_taints(node: Raw) -> tuple[Raw, ...]:
    """Return the taints of a Node that evict Pods."""
    taints = table_at(node, "spec").get("taints") or ()
    return tuple(t for t in taints if t.get("effect") == "NoExecute" and t.get("key") not in _TOLERATED_BY_DEFAULT)


def untolerated_taint(spec: Raw, taints: Iterable[Raw]) -> str | None:
    """Return the first of the taints that a PodSpec does not tolerate, in kubectl's notation, or None.

    Args:
        taints: The result of `evicting_taints`, so that the effect of each is `NoExecute`.
    """
    rows = spec.get("tolerations")
    tolerations = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for taint in taints:
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            value = taint.get("value")
            return f"{taint.get('key')}{f'={value}' if value else ''}:NoExecute"
    return None


def _tolerates(toleration: Raw, taint: Raw) -> bool:
    """Return whether the toleration matches the taint.

    The operator `Exists` matches every value. So does an unknown operator of a later Kubernetes version: the kubelet,
    which knows the operator, decides in the end.
    """
    if toleration.get("effect") not in (None, "", "NoExecute"):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    if toleration.get("operator") in (None, "", "Equal"):
        return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")
    return True
