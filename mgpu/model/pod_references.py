"""How texts that a tenant can read, such as Events and statuses of its pods, name other pods."""

from collections.abc import Iterable

STRANGER = "a pod of another namespace"
_STRANGERS = "pods of other namespaces"


def named_to(namespace: str, pods: Iterable[tuple[str, str]]) -> str:
    """Return the (namespace, name) pairs as a tenant of `namespace` may know them: its own pods by name.

    Of other namespaces the text says neither names nor how many there are. There is at least one pod.
    """
    found = set(pods)
    own = sorted(f"{namespace}/{name}" for its, name in found if its == namespace)
    others = len(found) - len(own)
    return ", ".join([*own, *([STRANGER if not own and others == 1 else _STRANGERS] if others else [])])
