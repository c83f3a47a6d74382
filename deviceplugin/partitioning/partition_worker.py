"""Makes the node's cards what they shall be, and says what they are: one look after the other, whatever has happened.

All that it needs stands in NVML, in the Node's annotations, in the CDI files and in the kubelet's checkpoint: so an
agent that ended anywhere is followed by one that goes on from there.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deviceplugin.kubelet.checkpoint import Given
from deviceplugin.partitioning.node_status import Report, reported
from deviceplugin.partitioning.partitioner import Cut, Cutter
from deviceplugin.pods.node_pods import GpuPod, NodePods
from deviceplugin.pods.slice_usage import (
    Environments,
    Users,
    given_out,
    handed_out,
    recorded,
    visible_cards,
    with_users,
)
from mgpu.kube import ApiError, Unreachable
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.node_slices import LABEL, MADE, NO_SLICES, NodeSlices, Partitioning, devices, read_slices, undivided
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MIG, MPS, Slice, is_mps, is_slice, mode_of, resource_of

log = logging.getLogger(__name__)

Raw = dict[str, Any]
TICK_SECONDS, _SOON_SECONDS, _PAUSE_SECONDS, _LONGEST_PAUSE = 5.0, 0.2, 1.0, 60.0
_APART_SECONDS = 0.1
"""Between two looks: pods come and go in crowds."""
_PATIENT_SECONDS = 2.0
"""So long nobody is told what is not known, or does not answer, yet."""
_STALLED_SECONDS = 120.0
_UNKNOWN_SECONDS, _MET = 30.0, float("-inf")
"""So long a pod that only the kubelet knows is taken for one that the API server has not told of yet; and what stands
in place of the time since when it is missed for one that was there, and has gone."""


class Plugins(Protocol):
    """As `SlicePlugins`."""

    def rows(self, resources: Iterable[str], alive: Callable[[str], bool]) -> Mapping[str, Sequence[Given]]: ...
    def offer(self, slices: Collection[Slice], unwell: Collection[Slice], alive: Callable[[str], bool]) -> None: ...
    def known(self, name: str) -> bool: ...


class Reports(Protocol):
    """As `Status`."""

    def write(self, report: Report | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """What a look is made from; from any thread.

    node: as the API has it; None: not known. gpus: all cards of the node; None: not known. synced: whether all pods
    are known.
    environments: what CDI files say. foreign: what pods hold without a record. bare: the UIDs of pods that run and were
    handed nothing. remains: whether a pod still runs that was deleted. warn: an Event on the node, and the log.
    changed: hears that `SliceWorker.state` has changed.
    """

    node: Callable[[], Raw | None]
    gpus: Callable[[], Sequence[Card] | None]
    pods: NodePods
    synced: Callable[[], bool]
    environments: Callable[[], Environments]
    foreign: Callable[[], Sequence[Holding]]
    bare: Callable[[], frozenset[str]]
    remains: Callable[[str], bool]
    warn: Callable[[str], None]
    changed: Callable[[], None]


class SliceWorker:
    """cutters: by mode. `start` runs looks on a thread of its own, until `stop`; `look` is one of them.

    state: what the cards are cut into, as this agent knows: the mode, what is made, which cards are not whole. None: it
    does not know yet.
    """

    def __init__(self, around: Around, cutters: Mapping[str, Cutter], plugins: Plugins, status: Reports) -> None:
        self._around, self._cutters, self._plugins, self._status = around, cutters, plugins, status
        self.state: NodeSlices | None = None
        self._looked = False
        self._found: NodeSlices | None = None
        self._told: dict[str, tuple[str, ...]] = {}
        self._served = False
        self._reported: Report | None = None
        self._refused: tuple[int, str] | None = None
        self._missed: dict[str, float] = {}
        self._soon = _SOON_SECONDS
        self._wake, self._stop = threading.Event(), threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="slices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A driver that hangs is left behind: the thread is a daemon."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=2)

    def wake(self) -> None:
        self._wake.set()

    @property
    def stalled(self) -> bool:
        """Whether it hangs in a call, or has ended by an error of its own."""
        begun, late = self._thread.ident is not None, time.monotonic() - self._beat > _STALLED_SECONDS
        return begun and (late or not self._thread.is_alive())

    def devices(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """The cards that nothing is cut from, and the slices as devices: what containers can be started on.

        A card that shall be cut, and is not while a pod has it, stays that pod's.
        """
        state = self.state or NO_SLICES
        cut = {*state.cards, *(s.card for s in state.made)}
        return (*(gpu for gpu in gpus if gpu.index not in cut), *devices(state, gpus))

    def whole(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """The cards that other vocabularies are offered: none that is cut, shall be, or can be by MIG."""
        return undivided(self.state or NO_SLICES, gpus)

    def _run(self) -> None:
        pause, well = _PAUSE_SECONDS, time.monotonic()
        while not self._stop.is_set():
            self._beat = time.monotonic()
            try:
                seconds = self.look()
                pause, well = _PAUSE_SECONDS, time.monotonic()
                self._say("look", [])
            except (RetryLater, ApiError, Unreachable) as error:
                log.info("not all is known or done yet: %s", error)
                if time.monotonic() - well > _PATIENT_SECONDS:
                    self._say("look", [str(error)])
                seconds, pause = pause, min(2 * pause, _LONGEST_PAUSE)
            self._stop.wait(_APART_SECONDS)
            self._wake.wait(seconds)
            self._wake.clear()
        self.withdraw()

    def withdraw(self) -> None:
        """Until there is an agent again, the kubelet fails every pod that comes for a slice: none is free."""
        if self._reported:
            used = tuple(s for s in self._reported.slices if s.pod)
            try:
                self._status.write(replace(self._reported, slices=used, done=None))
            except (ApiError, Unreachable) as error:
                log.warning("free slices are still reported: %s", error)

    def look(self) -> float:
        """Bring all one step further; how many seconds later it should be looked again, if nothing changes before.

        Raises RetryLater, ApiError and Unreachable.
        """
        node, gpus = self._around.node(), self._around.gpus()
        if node is None or gpus is None or not self._around.synced():
            return TICK_SECONDS
        found = self._read(node)
        if found is None:
            if (node["metadata"].get("labels") or {}).get(LABEL) not in (MIG, MPS):
                self._know(NO_SLICES)
            return TICK_SECONDS
        for mode, cutter in self._cutters.items():
            if mode != found.mode:
                cutter.leave()
        if not found.mode:
            return self._without()
        self._served = True
        made = found.made if self._looked else ()  # what the Node says of them may be of before a reboot
        spec = Partitioning(found.partitioning.spec)
        before = self.state.cards if self.state and self.state.mode == found.mode else frozenset()
        self._know(NodeSlices(found.mode, spec, made, before))
        environments = self._around.environments()

        def users(made: Collection[Slice]) -> Users:
            # By what is there: of an administrator's own instances the Node says nothing before the first look.
            rows = self._plugins.rows({resource_of(s.name) for s in made}, self._lives)
            given = given_out(((row.uid, row.ids) for of in rows.values() for row in of if not row.name), made)
            handed = handed_out(environments, made, self._lives)
            return {**recorded(self._around.pods.all()), **handed, **given}

        held = self._held(gpus, environments)
        bare = self._around.bare()
        suspects = (known for known in self._around.pods.all() if known.pod.uid not in bare)
        if found.mode == MPS and any(map(_on_unknown_instances, suspects)):
            held = frozenset(gpu.index for gpu in gpus)
        cut = self._cutters[found.mode].cut(found, gpus, users, held)
        slices = with_users(cut.made, users(cut.made), cut.busy)
        self._know(NodeSlices(found.mode, spec, slices, cut.cards))
        self._looked = True
        self._say("cards", cut.problems)
        if cut.refused and cut.refused != self._refused:
            self._refused = cut.refused
            self._around.warn(f"plan {cut.refused[0]} is refused: {cut.refused[1]}")
        return self._tell(gpus, cut, slices)

    def _tell(self, gpus: Sequence[Card], cut: Cut, slices: tuple[Slice, ...]) -> float:
        """The kubelet first: of what it does not know yet the API is not told, or pods would fail at admission."""
        ill = {gpu.index for gpu in gpus if not gpu.healthy} | cut.unwell
        self._offer(slices, {s for s in slices if s.card in ill})
        shown, complete = reported(slices, cut.unwell, self._plugins.known)
        self._reported = Report(shown, cut.cards, cut.done if complete else None, cut.refused)
        self._status.write(self._reported)
        if cut.retry:
            raise RetryLater(cut.retry)
        self._soon = TICK_SECONDS if complete else min(2 * self._soon, TICK_SECONDS)
        seconds, self._soon = self._soon, _SOON_SECONDS if complete else self._soon
        return seconds

    def _without(self) -> float:
        """A node without the label: nothing is cut here, and nothing that others have made is touched."""
        self._know(NO_SLICES)
        self._looked = True
        if self._served:
            self._offer((), ())
        self._reported = None
        self._status.write(None)
        return TICK_SECONDS

    def _read(self, node: Raw) -> NodeSlices | None:
        """What the Node says; where that makes no sense, what it said before; None: it has never made sense.

        What this agent wrote itself may be damaged: it is then as if it had not. made: as of the last look.
        """
        problems: list[str] = []
        found = self._found
        try:
            model = read_node(node)
            try:
                found = read_slices(model)
            except BadObject as error:
                problems = [*map(str, error.problems)]
                own = {key: text for key, text in model.annotations.items() if key != MADE}
                found = replace(read_slices(replace(model, annotations=own)), placed=False)
        except BadObject as error:
            problems = [*map(str, error.problems)]
        self._say("node", [f"{problem}; the last good state stays" for problem in problems])
        self._found = found
        if found is None:
            return None
        made = self.state.made if self._looked and self.state else found.made if found.placed else ()
        return replace(found, made=tuple(s for s in made if mode_of(s.name) == found.mode))

    def _held(self, gpus: Sequence[Card], environments: Environments) -> frozenset[int]:
        """The cards that pods in other vocabularies have, by records, by what was handed out, and by other plugins."""
        shares = [share for known in self._around.pods.all() if not known.pod.ended for share in known.shares or ()]
        shares += [share for holding in self._around.foreign() for share in holding.shares]
        uuids = {uuid for (uid, _), env in environments.items() if self._lives(uid) for uuid in visible_cards(env)}
        return frozenset(gpu.index for gpu in gpus if gpu.uuid in uuids or any(share.is_on(gpu) for share in shares))

    def _lives(self, uid: str) -> bool:
        """Return whether this is a pod of the node that has not ended, or one that was deleted and still runs."""
        if self._around.remains(uid):
            return True
        known, present = self._around.pods.by_uid(uid), self._around.pods.present().get(uid)
        return not known.pod.ended if known else present is not None and not present[1]

    def _offer(self, slices: Collection[Slice], unwell: Collection[Slice]) -> None:
        """The kubelet may know a pod before this agent does; and it forgets what a pod had only with the next one."""
        now, present, asked = time.monotonic(), self._around.pods.present(), dict[str, float]()

        def alive(uid: str) -> bool:
            asked[uid] = _MET if uid in present else self._missed.get(uid, now)
            return not present[uid][1] if uid in present else now - asked[uid] < _UNKNOWN_SECONDS

        self._plugins.offer(slices, unwell, alive)
        self._missed = asked

    def _know(self, state: NodeSlices) -> None:
        if state != self.state:
            self.state = state
            self._around.changed()

    def _say(self, about: str, problems: Sequence[str]) -> None:
        """Each problem once, as long as it lasts."""
        for problem in problems:
            if problem not in self._told.get(about, ()):
                self._around.warn(problem)
        self._told[about] = tuple(problems)


def _on_unknown_instances(known: GpuPod) -> bool:
    """Whether it runs on MIG instances that another plugin gave out. Which they are a node for MPS does not know, and
    they would go with their card's MIG mode.
    """
    asked = known.request.others if known.ran and known.request and not known.pod.ended else ()
    return known.shares is None and any(is_slice(request.type) and not is_mps(request.type) for request in asked)
