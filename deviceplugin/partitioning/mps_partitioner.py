"""MPS: the cards that a ConfigMap lists are shared through one MPS daemon each, and the others stay whole.

`ConfigMap` follows the configuration, which the scheduler writes as its plan and an administrator may write too.
`MpsPartitioner.reconcile` is called by the partition worker. The daemons themselves are the work of
`deviceplugin.isolation.mps`: the partitioner names the cards that need one.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from deviceplugin.mig.mig_driver import MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.desired_slices import Impossible, configured_slices
from deviceplugin.partitioning.partitioner import ObservedPartitions
from deviceplugin.pods.slice_usage import Users
from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, RetryLater, first
from mgpu.model.mps_config import config_of, read_config
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, Counts, Slice, counts, mode_of
from mgpu.settings.slice_settings import SlicesSettings


class ConfigMap:
    """This node's key of the ConfigMap. The watch starts with the first call of `text`: MIG nodes need none.

    Args:
        changed: is called, on the watch's thread, with every change.
    """

    def __init__(self, api: Api, node: str, settings: SlicesSettings, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self._name = f"{settings.config_map_namespace}/{settings.config_map}"
        path = f"/api/v1/namespaces/{settings.config_map_namespace}/configmaps"
        query = {"fieldSelector": f"metadata.name={settings.config_map}"}
        self._reflector = Reflector(api, path, self._take, lambda _: self._take(None), query)
        self._started = threading.Event()
        self._entry: tuple[str, str] | None = None

    def text(self) -> tuple[str, str]:
        """Return the node's configuration, "" where it has none, and its path. Raises RetryLater until it is known."""
        if not self._started.is_set():
            self._started.set()
            self._reflector.start()
        if not self._reflector.synced:
            raise RetryLater(f"ConfigMap {self._name} is not known yet")
        key, text = self._entry or (self._node, "")
        return text, f"ConfigMap {self._name} data[{key}]"

    def stop(self) -> None:
        if self._started.is_set():
            self._reflector.stop()

    def _take(self, raw: dict[str, Any] | None) -> None:
        self._entry = config_of((raw or {}).get("data") or {}, self._node)
        self._changed()


class ConfigSource(Protocol):
    """What is needed of `ConfigMap`."""

    def text(self) -> tuple[str, str]: ...


class MpsDaemons(Protocol):
    """What is needed of `deviceplugin.isolation.mps.clients.Mps`. Thread-safe."""

    def cut(self, cards: Collection[str]) -> None:
        """Keep daemons for exactly these cards, by UUID, beside those that have clients."""

    def well(self, card: str) -> bool:
        """Return whether the daemon of the card answers."""


class MpsPartitioner:
    """Used by the partition worker's thread alone.

    Args:
        config: how the cards are to be cut.
        daemons: the MPS daemons of the cards.
        manager: switches MIG mode off; None: the administrator does.
    """

    def __init__(self, config: ConfigSource, daemons: MpsDaemons, manager: ModeManager | None) -> None:
        self._config = config
        self._daemons = daemons
        self._manager = manager
        self._made: tuple[Slice, ...] | None = None
        self._parsed: tuple[str, Counts] | None = None
        self._invalid: tuple[str, BadObject] | None = None

    def leave(self) -> None:
        self._made = None
        self._daemons.cut(())

    def reconcile(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        users: Callable[[Collection[Slice]], Users],
        held: Collection[int],
    ) -> ObservedPartitions:
        used = users(())
        problems = self._settle(gpus, {*held, *(place.card for place in used if mode_of(place.name) == MIG)})
        if self._made is None:
            self._made = tuple(s.place for s in found.made)
        text, source = self._config.text()
        refused = None
        try:
            config = self._parse(text, source)
            own = [place for place in used if mode_of(place.name) != MIG]
            made = configured_slices(config, found.planned, self._made, own, gpus, held, source)
            # While the Node reports that this plan is refused, the scheduler may have written another one already.
            if not (found.refused and found.refused[0] == found.partitioning.plan):
                self._made = made
        except (BadObject, Impossible) as error:
            problems.append(str(error))
            refused = self._refused(found, str(error))
        return self._observed(found, gpus, self._made, refused, problems)

    def _observed(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        made: tuple[Slice, ...],
        refused: tuple[int, str] | None,
        problems: Sequence[str],
    ) -> ObservedPartitions:
        """Name the cards that need daemons, and return the observed state."""
        by_index = {gpu.index: gpu for gpu in gpus}
        cards = {s.card for s in made}
        self._daemons.cut([by_index[card].uuid for card in sorted(cards & by_index.keys())])
        desired = found.planned if found.planned is not None else made
        as_planned = counts(made) == _present(found.partitioning.spec) and {s.place for s in desired} == {*made}
        return ObservedPartitions(
            made=made,
            cards=frozenset(cards),
            unwell=frozenset(c for c in cards if c not in by_index or not self._daemons.well(by_index[c].uuid)),
            refused=refused,
            done=found.partitioning.plan if as_planned else None,
            problems=tuple(problems),
        )

    def _settle(self, gpus: Sequence[Card], held: Collection[int]) -> list[str]:
        """Switch MIG mode off, and return what is in the way."""
        if self._manager is None:
            return []
        try:
            off = {gpu.uuid: False for gpu in gpus}
            return [*self._manager.settle(off, {gpu.uuid for gpu in gpus if gpu.index in held}).values()]
        except MigRefused as error:
            return [str(error)]

    def _parse(self, text: str, source: str) -> Counts:
        """Return the configuration; an unchanged text, valid or not, is parsed once. Raises BadObject."""
        if self._invalid is not None and self._invalid[0] == text:
            raise BadObject(self._invalid[1].problems)
        if self._parsed is None or self._parsed[0] != text:
            try:
                self._parsed = text, read_config(text, source) if text else {}
            except BadObject as error:
                self._invalid = text, BadObject(first(error.problems))
                raise
        return self._parsed[1]

    def _refused(self, found: NodeSlices, reason: str) -> tuple[int, str] | None:
        """Return the plan as refused where the configuration is the plan's, and not an administrator's."""
        plan, spec = found.partitioning.plan, _present(found.partitioning.spec)
        is_the_plans = self._parsed is not None and _present(self._parsed[1]) == spec
        return (plan, reason) if plan not in (None, found.partitioning.applied) and is_the_plans else None


def _present(spec: Counts) -> dict[int, dict[str, int]]:
    """Return the counts without zeros."""
    found = {card: {name: n for name, n in names.items() if n} for card, names in spec.items()}
    return {card: names for card, names in found.items() if names}
