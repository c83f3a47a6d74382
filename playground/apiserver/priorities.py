"""The Priority admission plugin: a pod's number and preemption policy come from its PriorityClass."""

from playground.apiserver.errors import forbidden
from playground.apiserver.storage import Object, Storage

_CLASSES = "priorityclasses.scheduling.k8s.io"
_SYSTEM = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def resolve(storage: Storage, pod: Object) -> None:
    """Sets `priority`, `preemptionPolicy` and, from the default class, `priorityClassName`.

    Raises a 403 for a class that there is not, and for a pod that sets other values than its class itself.
    """
    spec = pod["spec"]
    about = pod["metadata"].get("name") or pod["metadata"].get("generateName") or ""
    items = storage.collection(_CLASSES).items
    name = spec.get("priorityClassName") or ""
    if not name:
        defaults = [i.obj for key in sorted(items) if (i := items[key]).obj.get("globalDefault")]
        name = defaults[0]["metadata"]["name"] if defaults else ""
    item = items.get(("", name))
    if name and item is None and name not in _SYSTEM:
        raise forbidden("", "pods", about, f"no PriorityClass with name {name} was found")
    found = item.obj if item else {}
    if name:
        spec["priorityClassName"] = name
    policy = found.get("preemptionPolicy") or "PreemptLowerPriority"
    for field, named, value in (
        ("priority", "the integer value of priority", found.get("value", _SYSTEM.get(name, 0))),
        ("preemptionPolicy", "the string value of PreemptionPolicy", policy),
    ):
        if spec.get(field) not in (None, value):
            computed = f"priority admission controller computed {value} from the given PriorityClass name"
            raise forbidden("", "pods", about, f"{named} ({spec[field]}) must not be provided in pod spec; {computed}")
        spec[field] = value
