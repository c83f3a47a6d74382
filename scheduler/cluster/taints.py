"""Taints that keep a Pod from running on the node that it names: the kubelet refuses it, and it has failed for good.

Of those of a node only `NoExecute` counts: whoever names a node passes the scheduler by, which looks at the others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mgpu.model.raw_objects import table_at

Raw = Mapping[str, Any]

_WAITED_FOR = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The API server lets every Pod tolerate these for a while (admission plugin DefaultTolerationSeconds)."""


def evicting(node: Raw) -> tuple[Raw, ...]:
    """The node's taints that count."""
    taints = table_at(node, "spec").get("taints") or ()
    return tuple(t for t in taints if t.get("effect") == "NoExecute" and t.get("key") not in _WAITED_FOR)


def untolerated(spec: Raw, taints: Iterable[Raw]) -> str:
    """The first of the taints that a PodSpec does not tolerate, as people read it; "" where it tolerates all."""
    rows = spec.get("tolerations")
    tolerations = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for taint in taints:
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            value = taint.get("value")
            return f"{taint.get('key')}{f'={value}' if value else ''}:NoExecute"
    return ""


def _tolerates(toleration: Raw, taint: Raw) -> bool:
    """Operators of later Kubernetes count as meeting the taint: the kubelet, who knows them, has the last word."""
    if toleration.get("effect") not in (None, "", "NoExecute"):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    if toleration.get("operator") in (None, "", "Equal"):
        return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")
    return True
