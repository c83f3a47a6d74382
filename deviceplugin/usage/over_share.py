"""Finds the containers that use more memory of a card than their share, where nothing holds them to it.

`OverShare.newly_over` says it once for each container and card. It says it again only after the container has been
within its share for `CALM_SECONDS`, so that one whose use goes up and down around its share is not reported all the
time. `usage_reader` writes the Events.
"""

from collections.abc import Callable, Iterable, Sequence

from deviceplugin.usage.container_use import ContainerUse
from mgpu.model.quantities import format_bytes

CALM_SECONDS = 300.0
_MOST_NAMES = 5

_Place = tuple[str, str, str]


class OverShare:
    """The containers that have been reported. Use it on one thread."""

    def __init__(self) -> None:
        # By the UID of the pod, the container and the card: since when the container has been within its share, or None
        # if it is above it.
        self._calm_since: dict[_Place, float | None] = {}

    def newly_over(
        self, uses: Sequence[ContainerUse], is_held: Callable[[ContainerUse], bool], now: float
    ) -> tuple[ContainerUse, ...]:
        """Return the containers that have gone over their share and were not reported.

        A container whose use is not known stays as it was. Containers that are not in `uses` are forgotten.

        Args:
            is_held: Whether an isolation back end holds the container to its share.
            now: The time of a monotonic clock.
        """
        kept: dict[_Place, float | None] = {}
        found = []
        for use in uses:
            place = (*use.key, use.card.uuid)
            was_reported = place in self._calm_since
            if use.memory is None:
                if was_reported:
                    kept[place] = self._calm_since[place]
            elif is_over(use) and not is_held(use):
                kept[place] = None
                if not was_reported:
                    found.append(use)
            elif was_reported:
                since = self._calm_since[place]
                calm_since = now if since is None else since
                if now - calm_since < CALM_SECONDS:
                    kept[place] = calm_since
        self._calm_since = kept
        return tuple(found)


def is_over(use: ContainerUse) -> bool:
    return not use.whole and use.limit is not None and use.memory is not None and use.memory > use.limit


def message(use: ContainerUse, all_uses: Iterable[ContainerUse]) -> str:
    """Return the text of the Event. Tenants read it, so it names no pods of other namespaces."""
    others = {(one.namespace, one.pod) for one in all_uses if one.card.uuid == use.card.uuid}
    others.discard((use.namespace, use.pod))
    own = sorted(f"{space}/{name}" for space, name in others if space == use.namespace)
    hidden = len(others) - len(own)
    words = own[:_MOST_NAMES]
    if len(own) > _MOST_NAMES:
        words.append(f"{len(own) - _MOST_NAMES} more pods of {use.namespace}")
    if hidden:
        words.append(f"{hidden} pod{'s' if hidden > 1 else ''} of other namespaces")
    beside = f"; the card is shared with {', '.join(words)}" if words else ""
    used, share = _amounts(use.memory or 0, use.limit or 0)
    return (
        f"container {use.container} uses {used} of card {use.card.index} ({use.card.uuid}), its share is {share}, and "
        f"nothing holds it to that{beside}"
    )


def _amounts(used: int, share: int) -> tuple[str, str]:
    """Return both amounts in a unit in which they differ."""
    texts = format_bytes(used), format_bytes(share)
    return texts if texts[0] != texts[1] else (f"{used} B", f"{share} B")
