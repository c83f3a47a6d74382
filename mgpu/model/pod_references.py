"""Names pods in texts that tenants can read, without names from other namespaces.

The scheduler uses it for Events and for the statuses of MtgpuPods.
"""

from collections.abc import Iterable

FOREIGN_POD = "a pod of another namespace"
_STRANGERS = "pods of other namespaces"


def names_visible_to(namespace: str, pods: Iterable[tuple[str, str]]) -> str:
    """Return a text that names the pods of `namespace`, and mentions other pods without their names and number.

    Args:
        pods: at least one (namespace, name).
    """
    found = set(pods)
    own = sorted(f"{namespace}/{name}" for its, name in found if its == namespace)
    others = len(found) - len(own)
    return ", ".join([*own, *([FOREIGN_POD if not own and others == 1 else _STRANGERS] if others else [])])
