"""How Events and statuses, which tenants can read, name other pods: never by a name from another namespace."""

from collections.abc import Iterable

FOREIGN_POD = "a pod of another namespace"
_STRANGERS = "pods of other namespaces"


def names_visible_to(namespace: str, pods: Iterable[tuple[str, str]]) -> str:
    """Return a text for pods as a tenant of `namespace` may see them: its own by name, others without name and number.

    Args:
        pods: at least one (namespace, name).
    """
    found = set(pods)
    own = sorted(f"{namespace}/{name}" for its, name in found if its == namespace)
    others = len(found) - len(own)
    return ", ".join([*own, *([FOREIGN_POD if not own and others == 1 else _STRANGERS] if others else [])])
