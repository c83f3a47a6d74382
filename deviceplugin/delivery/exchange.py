"""Without CDI: what Allocate said stands, so the records are made to say the same (`deviceplugin.delivery.swap`)."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from deviceplugin.delivery.swap import Key, cards_in, exchangeable, partner, record, room, with_cards
from deviceplugin.metrics import CORRECTIONS
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target, environment, environment_on, recorded_cards
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.cards import Card
from mgpu.settings import Settings


class Exchange:
    """On one event loop. `write`: sends a pod's new annotations to the API server, later. sealed: records are sealed,
    and what an agent writes of them would not count.
    """

    def __init__(
        self,
        pods: NodePods,
        cards: Callable[[], Sequence[Card]],
        settings: Settings,
        write: Callable[[GpuPod, Mapping[str, str]], None],
        *,
        sealed: bool = False,
    ) -> None:
        self._sealed = sealed
        self._pods, self._cards, self._settings, self._write = pods, cards, settings, write
        self._settled: set[Key] = set()

    def settle(self, target: Target, env: Mapping[str, str], served: set[Key]) -> None:
        """The container runs on what `env` says. `served`: whose decision was given away, kept true.

        Raises Refused where it must not run on that.
        """
        cards = self._cards()
        own, given = recorded_cards(target, cards), cards_in(env, cards)
        why = f"{target}: the runtime has no CDI, and at admission the cards of another pod were given to it"
        if not given or dict(env) != environment_on(target, given):
            raise Refused(why, target.known.pod.uid)
        other = None
        if own != given and self._sealed:
            rule = "its record is sealed, so that only the scheduler can change it; delete the pod"
            raise Refused(f"{why}; {rule}", target.known.pod.uid)
        if own != given and not exchangeable(target):
            raise Refused(why, target.known.pod.uid)
        if own != given or target.key not in served:
            other = partner(target, given, cards, self._pods.all(), self._settled, served)
        if own != given:
            # The other one's first: an agent that dies between the two finds these cards free, and this pod on them.
            if other is not None:
                self._amend(other, own)
            elif short := room(target, given, cards, self._pods.all()):
                raise Refused(f"{why}; {short}", target.known.pod.uid)
            self._amend(target, given)
            CORRECTIONS.labels("records").inc()
        if other is not None and target.key not in served:
            # What this one had is still to be given, and it is the other one's now.
            served.discard(other.key)
        served.add(target.key)
        self._settled.add(target.key)

    def agrees(self, target: Target, env: Mapping[str, str]) -> bool:
        """Whether the record says what `env` does; then the container is settled."""
        try:
            agrees = dict(env) == environment(target, self._cards())
        except Refused:
            return False
        if agrees:
            self._settled.add(target.key)
        return agrees

    def _amend(self, target: Target, cards: Sequence[Card]) -> None:
        # Both containers may be of one pod: what was amended before counts.
        now = self._pods.by_uid(target.known.pod.uid) or target.known
        amended = with_cards(Target(now, target.container), cards)
        annotations = record(amended, self._cards(), self._settings, time.time_ns())
        self._pods.amend(now, annotations)
        self._write(now, annotations)

    def keep_only(self, uids: Collection[str]) -> None:
        self._settled = {key for key in self._settled if key[0] in uids}
