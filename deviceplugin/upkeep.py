"""What was of pods that are gone goes, whether or not anybody saw them go."""

from collections.abc import Collection, Sequence
from typing import Protocol

from deviceplugin.pods import NodePods
from deviceplugin.wakeup import Wakeup


class Keeper(Protocol):
    def keep_only(self, uids: Collection[str]) -> None:
        """All pods but these are gone."""


async def keep_clean(pods: NodePods, keepers: Sequence[Keeper], changed: Wakeup) -> None:
    """From the moment that all pods are known until cancelled; first what earlier agents left.

    Not by comparing what was there with what is: a pod may have come, been served and gone between two looks.
    """
    dropped = -1
    while True:
        if dropped != pods.dropped:
            dropped = pods.dropped
            there = {known.pod.uid for known in pods.all()}
            for keeper in keepers:
                keeper.keep_only(there)
        await changed.wait()
