"""Divides the cards that a ConfigMap lists into MPS shares, and leaves the other cards whole.

The scheduler writes its plan into the ConfigMap as the configuration of the node; administrators may write a
configuration too. Each card with MPS shares needs an MPS daemon. `deviceplugin.isolation.mps` runs the daemons: the
partitioner only names the cards that need one. `partition_worker` calls `MpsPartitioner.reconcile`.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from deviceplugin.mig.mig_driver import MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.desired_slices import PlanNotApplicable, configured_slices, without_zeros
from deviceplugin.partitioning.partitioner import ObservedPartitions, PartitionContext
from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.errors import BadObject, RetryLater, shorten_problems
from mgpu.model.mps_config import config_of, read_config
from mgpu.model.slice_names import MIG, Slice, SliceCounts, count_slices, mode_of
from mgpu.settings.slice_settings import SlicesSettings


class ConfigMap:
    """Watches the configuration of this node in the ConfigMap that the settings name (`DevicePluginCMName`).

    The watch starts with the first call of `text`, since MIG nodes do not need the ConfigMap. The partition worker's
    thread calls `text`, and the watch's thread replaces the configuration.

    Args:
        changed: A function that is called on the watch's thread after every change.
    """

    def __init__(self, api: Api, node: str, settings: SlicesSettings, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self._name = f"{settings.config_map_namespace}/{settings.config_map}"
        path = f"/api/v1/namespaces/{settings.config_map_namespace}/configmaps"
        query = {"fieldSelector": f"metadata.name={settings.config_map}"}
        self._reflector = Reflector(api, path, self._update, lambda _: self._update(None), query)
        self._started = threading.Event()
        self._entry: tuple[str, str] | None = None

    def text(self) -> tuple[str, str]:
        """Return the node's configuration as a text, which is "" if there is none, and its path for error messages.

        Raises RetryLater until the ConfigMap has been read.
        """
        if not self._started.is_set():
            self._started.set()
            self._reflector.start()
        if not self._reflector.synced:
            raise RetryLater(f"ConfigMap {self._name} has not been read yet")
        key, text = self._entry or (self._node, "")
        return text, f"ConfigMap {self._name} data[{key}]"

    def stop(self) -> None:
        if self._started.is_set():
            self._reflector.stop()

    def _update(self, raw: dict[str, Any] | None) -> None:
        self._entry = config_of((raw or {}).get("data") or {}, self._node)
        self._changed()


class ConfigSource(Protocol):
    """The part of `ConfigMap` that is used here."""

    def text(self) -> tuple[str, str]: ...


class MpsDaemons(Protocol):
    """The part of `deviceplugin.isolation.mps.clients.Mps` that is used here. Thread-safe."""

    def set_partitioned_cards(self, cards: Collection[str]) -> None:
        """Run a daemon for each of these cards, named by UUID. Cards that have clients keep their daemons too."""

    def is_healthy(self, card: str) -> bool:
        """Return whether the daemon of the card answers."""


class MpsPartitioner:
    """The partitioner of MPS nodes. Only the partition worker's thread uses it.

    Args:
        manager: The manager that switches MIG mode off; None if administrators switch it.
    """

    def __init__(self, config: ConfigSource, daemons: MpsDaemons, manager: ModeManager | None) -> None:
        self._config = config
        self._daemons = daemons
        self._manager = manager
        self._slices: tuple[Slice, ...] | None = None
        self._parsed: tuple[str, SliceCounts] | None = None
        self._invalid: tuple[str, BadObject] | None = None

    def reset(self) -> None:
        self._slices = None
        self._daemons.set_partitioned_cards(())

    def reconcile(self, context: PartitionContext) -> ObservedPartitions:
        problems = self._switch_mode_off(context)
        if self._slices is None:
            self._slices = tuple(s.place for s in context.reported.existing)
        text, source = self._config.text()
        refused = None
        try:
            config = self._parse(text, source)
            used = [place for place in context.users(()) if mode_of(place.name) != MIG]
            planned = context.reported.planned
            slices = configured_slices(config, planned, self._slices, used, context.gpus, context.held, source)
            # While the Node reports that this plan is refused, the scheduler may be replacing the plan. Until a new
            # plan arrives, the slices stay as they are.
            if not context.is_refused():
                self._slices = slices
        except (BadObject, PlanNotApplicable) as error:
            problems.append(str(error))
            if context.pending_plan is not None and self._is_planned(context, text):
                refused = context.pending_plan, str(error)
        return self._observed(context, self._slices, refused, problems)

    def _observed(
        self,
        context: PartitionContext,
        slices: tuple[Slice, ...],
        refused: tuple[int, str] | None,
        problems: Sequence[str],
    ) -> ObservedPartitions:
        """Tell `Mps` which cards need daemons, and return the observed state."""
        by_index = {gpu.index: gpu for gpu in context.gpus}
        cards = {s.card for s in slices}
        self._daemons.set_partitioned_cards([by_index[card].uuid for card in sorted(cards & by_index.keys())])
        healthy = {card for card in cards & by_index.keys() if self._daemons.is_healthy(by_index[card].uuid)}
        planned = context.reported.planned
        is_applied = count_slices(slices) == without_zeros(context.reported.partitioning.spec) and (
            planned is None or {s.place for s in planned} == {*slices}
        )
        return ObservedPartitions(
            slices=slices,
            cards=frozenset(cards),
            unhealthy=frozenset(cards - healthy),
            refused=refused,
            applied=context.plan if is_applied else None,
            problems=tuple(problems),
        )

    def _switch_mode_off(self, context: PartitionContext) -> list[str]:
        if self._manager is None:
            return []
        try:
            return context.switch_mig_mode(self._manager, on=False)
        except MigRefused as error:
            return [str(error)]

    def _parse(self, text: str, source: str) -> SliceCounts:
        """Return the configuration. An unchanged text, valid or not, is parsed only once. Raises BadObject."""
        if self._invalid is not None and self._invalid[0] == text:
            raise BadObject(self._invalid[1].problems)
        if self._parsed is None or self._parsed[0] != text:
            try:
                self._parsed = text, read_config(text, source) if text else {}
            except BadObject as error:
                self._invalid = text, BadObject(shorten_problems(error.problems))
                raise
        return self._parsed[1]

    def _is_planned(self, context: PartitionContext, text: str) -> bool:
        """Return whether the text is valid and has the slice counts of the Node's plan.

        If it does not, an administrator may have written it, so errors in it are no reason to refuse the plan.
        """
        spec = without_zeros(context.reported.partitioning.spec)
        return self._parsed is not None and self._parsed[0] == text and without_zeros(self._parsed[1]) == spec
