"""MPS: the cards that a ConfigMap lists are shares of one daemon each; the others stay whole."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from deviceplugin.mig.mig_driver import MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.desired_slices import Impossible, configured_slices
from deviceplugin.partitioning.partitioner import Cut
from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, first
from mgpu.model.mps_config import read_config
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, Counts, Slice, counts, mode_of


class Configs(Protocol):
    """The ConfigMap that says how cards are cut."""

    def text(self) -> tuple[str, str]:
        """What it says of this node, and where that stands. Raises RetryLater where it is not known."""


class Daemons(Protocol):
    """The MPS daemons of the cards that are cut; from any thread."""

    def cut(self, cards: Collection[str]) -> None:
        """These cards, by UUID, and no others are cut."""

    def well(self, card: str) -> bool:
        """Whether the card's daemon answers."""


class MpsCutter:
    """The config manager's other half. manager: switches MIG mode off; None: somebody else does. Used by one thread."""

    def __init__(self, configs: Configs, daemons: Daemons, manager: ModeManager | None) -> None:
        self._configs, self._daemons, self._manager = configs, daemons, manager
        self._made: tuple[Slice, ...] | None = None
        self._read: tuple[str, Counts] | None = None
        self._unread: tuple[str, BadObject] | None = None

    def leave(self) -> None:
        self._made = None
        self._daemons.cut(())

    def cut(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        users: Callable[[Collection[Slice]], Users],
        held: Collection[int],
    ) -> Cut:
        used = users(())
        problems = self._settle(gpus, {*held, *(place.card for place in used if mode_of(place.name) == MIG)})
        if self._made is None:
            self._made = tuple(s.place for s in found.made)
        text, source = self._configs.text()
        refused = None
        try:
            config = self._parse(text, source)
            own = [place for place in used if mode_of(place.name) != MIG]
            made = configured_slices(config, found.planned, self._made, own, gpus, held, source)
            # Of a plan that was refused the Node must first say so no longer: there may be another one already.
            if not (found.refused and found.refused[0] == found.partitioning.plan):
                self._made = made
        except (BadObject, Impossible) as error:
            problems.append(str(error))
            refused = self._refused(found, str(error))
        made, by_index = self._made, {gpu.index: gpu for gpu in gpus}
        cards = {s.card for s in made}
        self._daemons.cut([by_index[card].uuid for card in sorted(cards & by_index.keys())])
        wanted = found.planned if found.planned is not None else made
        plan = found.partitioning.plan
        as_planned = counts(made) == _present(found.partitioning.spec) and {s.place for s in wanted} == {*made}
        return Cut(
            made=made,
            cards=frozenset(cards),
            unwell=frozenset(c for c in cards if c not in by_index or not self._daemons.well(by_index[c].uuid)),
            refused=refused,
            done=plan if as_planned else None,
            problems=tuple(problems),
        )

    def _settle(self, gpus: Sequence[Card], held: Collection[int]) -> list[str]:
        if self._manager is None:
            return []
        try:
            off = {gpu.uuid: False for gpu in gpus}
            return [*self._manager.settle(off, {gpu.uuid for gpu in gpus if gpu.index in held}).values()]
        except MigRefused as error:
            return [str(error)]

    def _parse(self, text: str, source: str) -> Counts:
        """Read again where its content has changed, also one that could not be read. Raises BadObject."""
        if self._unread is not None and self._unread[0] == text:
            raise BadObject(self._unread[1].problems)
        if self._read is None or self._read[0] != text:
            try:
                self._read = text, read_config(text, source) if text else {}
            except BadObject as error:
                self._unread = text, BadObject(first(error.problems))
                raise
        return self._read[1]

    def _refused(self, found: NodeSlices, why: str) -> tuple[int, str] | None:
        """The plan is refused where the configuration is the plan's; another writer's has nothing to do with it."""
        plan, spec = found.partitioning.plan, _present(found.partitioning.spec)
        is_the_plans = self._read is not None and _present(self._read[1]) == spec
        return (plan, why) if plan not in (None, found.partitioning.applied) and is_the_plans else None


def _present(spec: Counts) -> dict[int, dict[str, int]]:
    found = {card: {name: n for name, n in names.items() if n} for card, names in spec.items()}
    return {card: names for card, names in found.items() if names}
