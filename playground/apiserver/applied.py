"""Server-side apply, as far as it goes without field ownership: applying again takes back what is left out now.

Not there: `managedFields`, conflicts between managers.
"""

from typing import Any

from playground.apiserver.storage import Object
from playground.apiserver.strategic import merge_key

_IDENTITY = ("apiVersion", "kind")


def removal(before: Object, after: Object, *, lists: bool) -> Object:
    """The patch that takes back what `before` set and `after` does not; `lists` merges lists by their keys."""
    patch: Object = {}
    for name, value in before.items():
        if name in _IDENTITY:
            continue
        wanted = after.get(name)
        if name not in after:
            patch[name] = None
        elif isinstance(value, dict) and isinstance(wanted, dict):
            patch[name] = removal(value, wanted, lists=lists)
        elif lists and isinstance(value, list) and isinstance(wanted, list) and (key := merge_key(name, value)):
            patch[name] = _items(value, wanted, key)
    return {name: value for name, value in patch.items() if value not in ({}, [])}


def _items(before: list[Any], after: list[Any], key: str) -> list[Object]:
    kept = {item.get(key): item for item in after}
    patches = []
    for item in before:
        ident = item.get(key)
        if ident not in kept:
            patches.append({key: ident, "$patch": "delete"})
        elif inner := removal(item, kept[ident], lists=True):
            patches.append({key: ident, **inner})
    return patches


class Applied:
    """What each manager last applied to each object, for as long as the server runs."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Object] = {}

    def before(self, uid: str, manager: str) -> Object:
        return self._last.get((uid, manager), {})

    def keep(self, uid: str, manager: str, patch: Object) -> None:
        self._last[(uid, manager)] = patch
