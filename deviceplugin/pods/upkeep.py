"""Removing what was kept for pods that have gone, whether or not their deletion was seen."""

from collections.abc import Collection, Sequence
from typing import Protocol

from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.node_pods import NodePods


class Remaining(Protocol):
    """Pods that still run though the API has no such pod (`deviceplugin.pods.remnants`). removed: how many ended."""

    removed: int

    def uids(self) -> Collection[str]: ...


class Keeper(Protocol):
    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all pods but these."""


async def keep_clean(pods: NodePods, remnants: Remaining, keepers: Sequence[Keeper], changed: Wakeup) -> None:
    """Start once all pods are known, with what earlier agents left; run until cancelled.

    A pod may come, be served and go between two looks, so sets of pods are not compared. A pod whose object has gone is
    kept for as long as its containers may run.
    """
    done = None
    while True:
        now = pods.dropped, remnants.removed
        if now != done:
            done = now
            there = {known.pod.uid for known in pods.all()} | {*remnants.uids()}
            for keeper in keepers:
                keeper.keep_only(there)
        await changed.wait()
