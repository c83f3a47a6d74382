"""The Priority admission plugin: a pod's number and preemption policy come from its PriorityClass."""

from playground.apiserver.errors import forbidden
from playground.apiserver.storage import Object, Storage

_CLASSES = "priorityclasses.scheduling.k8s.io"
_SYSTEM = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def resolve(storage: Storage, pod: Object) -> None:
    """Sets `priority`, `preemptionPolicy` and, from the default class, `priorityClassName`. Raises a 403."""
    spec = pod["spec"]
    items = storage.collection(_CLASSES).items
    name = spec.get("priorityClassName") or ""
    if not name:
        defaults = [i.obj for key in sorted(items) if (i := items[key]).obj.get("globalDefault")]
        name = defaults[0]["metadata"]["name"] if defaults else ""
    item = items.get(("", name))
    if name and item is None and name not in _SYSTEM:
        about = pod["metadata"].get("name") or pod["metadata"].get("generateName") or ""
        raise forbidden("", "pods", about, f"no PriorityClass with name {name} was found")
    found = item.obj if item else {}
    if name:
        spec["priorityClassName"] = name
    spec["priority"] = found.get("value", _SYSTEM.get(name, 0))
    spec["preemptionPolicy"] = found.get("preemptionPolicy") or "PreemptLowerPriority"
