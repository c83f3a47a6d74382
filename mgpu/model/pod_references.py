"""Names pods in texts that tenants can read, without names from other namespaces.

The agent uses it for the reasons why a container may not start, which appear in Events on the pod.
"""

from collections.abc import Iterable

FOREIGN_POD = "a pod of another namespace"
_STRANGERS = "pods of other namespaces"


def names_visible_to(namespace: str, pods: Iterable[tuple[str, str]]) -> str:
    """Return a text with the names of the pods of `namespace`. It mentions pods of other namespaces without names.

    Args:
        pods: the namespace and the name of each pod; at least one.
    """
    found = set(pods)
    own = sorted(f"{namespace}/{name}" for its, name in found if its == namespace)
    others = len(found) - len(own)
    return ", ".join([*own, *([FOREIGN_POD if not own and others == 1 else _STRANGERS] if others else [])])
