"""Creates the MIG instances of the plan, keeps those in use, and rolls back if a plan cannot be applied.

`partition_worker` calls `MigPartitioner.reconcile` every few seconds and after every change. Each call starts from the
state that NVML reports, because the agent may have crashed during the call before. If one card refuses its part of a
new plan, all cards are rolled back. `deviceplugin.mig.instance_changes` changes each card.
"""

from collections.abc import Collection, Mapping, Sequence

from deviceplugin.mig.instance_changes import apply
from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused, existing_instances, usable_instances
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.desired_slices import PlanNotApplicable, placeable_instances, planned_instances
from deviceplugin.partitioning.partitioner import ObservedPartitions, PartitionContext
from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, invalid_reason
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import Slice, read_name

Cards = Mapping[int, MigCard]
"""The cards that answer and support MIG, by their index on the node."""
Instances = dict[int, frozenset[Instance]]
"""The MIG instances of each card, by the index of the card."""


class MigPartitioner:
    """The partitioner of MIG nodes. Only the partition worker's thread uses it.

    Args:
        manager: The manager that switches the cards' MIG mode; None if administrators switch it.
    """

    def __init__(self, driver: MigDriver, manager: ModeManager | None) -> None:
        self._driver = driver
        self._manager = manager
        # The state to which a failed plan is rolled back; None before the first reconciliation.
        self._last_good: Instances | None = None
        self._refused: tuple[int, str] | None = None
        # The result of `_circumstances` after the last rollback. A refused plan is tried again only after the result
        # has changed.
        self._refused_circumstances: object = None
        # The attributes from here on describe the current reconciliation.
        self._problems: list[str] = []
        self._retry_reasons: list[str] = []
        self._changed = False

    def reset(self) -> None:
        self._last_good = None
        self._refused = None
        self._refused_circumstances = None

    def reconcile(self, context: PartitionContext) -> ObservedPartitions:
        self._problems = []
        self._retry_reasons = []
        cards = self._switch_mode(context, self._read(context.gpus))
        if self._last_good is None:
            self._last_good = _initial_state(context.reported, cards)
        in_use = _in_use(context.reported, cards, context.users(_usable_slices(cards)))
        desired = self._desired(context, cards, in_use)
        if desired is not None:
            is_applied = self._apply(context, cards, desired, in_use)
            cards = self._read_again(context.gpus, cards)
            if is_applied:
                self._refused = None
                self._last_good = {**self._last_good, **desired}
                is_done = not self._retry_reasons and all(
                    desired.get(i) == usable_instances(card) for i, card in cards.items()
                )
                return self._observed(context, cards, is_done=is_done)
        # Cards that already have their planned instances are rolled back too.
        self._apply(context, cards, self._rollback_state(cards, in_use), in_use, is_rollback=True)
        cards = self._read_again(context.gpus, cards)
        self._refused_circumstances = _circumstances(context.reported, cards, in_use)
        return self._observed(context, cards, is_done=False)

    def _switch_mode(self, context: PartitionContext, cards: Cards) -> Cards:
        """Put every card into MIG mode. The reasons why cards keep their mode become problems."""
        if self._manager is None or all(card.current and card.pending for card in cards.values()):
            return cards
        try:
            self._problems += context.switch_mig_mode(self._manager, on=True)
        except MigRefused as error:
            raise RetryLater(str(error)) from error
        return self._read(context.gpus)

    def _read(self, gpus: Sequence[Card]) -> Cards:
        try:
            by_uuid = {card.uuid: card for card in self._driver.read() if card.capable}
        except MigRefused as error:
            raise RetryLater(str(error)) from error
        return {gpu.index: by_uuid[gpu.uuid] for gpu in gpus if gpu.uuid in by_uuid}

    def _read_again(self, gpus: Sequence[Card], cards: Cards) -> Cards:
        """Read the cards again if any of them was changed since the last reading."""
        changed = self._changed
        self._changed = False
        return self._read(gpus) if changed else cards

    def _desired(self, context: PartitionContext, cards: Cards, in_use: Instances) -> Instances | None:
        """Return the desired instances, or None if the last good state is desired.

        Without a plan, all existing instances stay, since an administrator may need them. A refused plan is tried again
        only after the circumstances have changed and the Node does not report the refusal any more. While the Node
        reports it, the scheduler may be replacing the plan.
        """
        if context.plan is None:
            return {index: existing_instances(card) | in_use[index] for index, card in cards.items()}
        circumstances = _circumstances(context.reported, cards, in_use)
        if self._refused and (self._refused[0] != context.plan or self._refused_circumstances != circumstances):
            self._refused = None
        healthy = {gpu.index for gpu in context.gpus if gpu.healthy}
        silent = (healthy - cards.keys()) & _planned_cards(context.reported)
        if silent:
            self._retry_reasons.append(f"card {min(silent)} does not answer queries about MIG")
        if silent or self._refused or context.is_refused():
            return None
        # A card whose MIG mode is still pending has no instances yet, so no plan for it can be applied.
        layouts = {index: card.layout for index, card in cards.items() if card.current and card.layout}
        current = {index: existing_instances(card) for index, card in cards.items()}
        try:
            desired = planned_instances(context.reported, layouts, current, self._last_good or {}, in_use)
        except PlanNotApplicable as error:
            self._refuse(context, str(error))
            return None
        return {index: desired.get(index, frozenset()) for index in cards}

    def _apply(
        self,
        context: PartitionContext,
        cards: Cards,
        desired: Instances,
        in_use: Instances,
        *,
        is_rollback: bool = False,
    ) -> bool:
        """Change the cards. Return False, and refuse the plan, if a card refuses its part of a new plan."""
        healthy = {gpu.index for gpu in context.gpus if gpu.healthy}
        for index, card in sorted(cards.items()):
            if desired[index] == usable_instances(card) == existing_instances(card):
                continue
            try:
                self._change(index, card, desired[index], in_use.get(index, frozenset()), healthy=index in healthy)
            except RetryLater as error:
                self._retry_reasons.append(str(error))
            except MigRefused as error:
                if not is_rollback and context.pending_plan is not None:
                    self._refuse(context, str(error))
                    return False
                self._problems.append(str(error))
        return True

    def _change(
        self, index: int, card: MigCard, desired: frozenset[Instance], in_use: frozenset[Instance], *, healthy: bool
    ) -> None:
        if not healthy:
            raise MigRefused(f"card {index} is unhealthy")
        self._changed = True
        apply(self._driver, card.uuid, desired, in_use)

    def _refuse(self, context: PartitionContext, reason: str) -> None:
        """Refuse the plan. For a plan that has been applied before, report the reason as a problem instead."""
        if context.pending_plan is not None:
            self._refused = context.pending_plan, reason
        else:
            self._problems.append(reason)

    def _rollback_state(self, cards: Cards, in_use: Instances) -> Instances:
        """Return the instances in use, and those of the last good state that fit beside them.

        For a card without a last good state, its existing instances count as that state.
        """
        good = self._last_good or {}
        return {
            index: placeable_instances(
                card.layout, [*in_use.get(index, ()), *sorted(good.get(index, existing_instances(card)))]
            )
            for index, card in cards.items()
        }

    def _observed(self, context: PartitionContext, cards: Cards, *, is_done: bool) -> ObservedPartitions:
        """Return the observed state. A card that does not answer keeps its slices, but new pods do not get them."""
        silent = {gpu.index for gpu in context.gpus} - cards.keys()
        lost = [s for s in context.reported.existing if s.card in silent]
        lost_cards = frozenset(s.card for s in lost)
        return ObservedPartitions(
            slices=tuple(sorted((*_usable_slices(cards), *lost))),
            busy=frozenset(s.place for i, card in cards.items() for s in _card_slices(i, card, only_busy=True)),
            cards=frozenset(index for index, card in cards.items() if card.current) | lost_cards,
            unhealthy=lost_cards,
            refused=self._refused,
            applied=context.plan if is_done else None,
            problems=tuple(self._problems),
            retry_reason="; ".join(self._retry_reasons) or None,
        )


def _planned_cards(reported: NodeSlices) -> set[int]:
    return {*reported.partitioning.spec, *(s.card for s in reported.planned or ())}


def _circumstances(reported: NodeSlices, cards: Cards, in_use: Instances) -> object:
    """Return the data that decide whether a plan can be applied, to be compared with `==`."""
    observed = {
        index: (card.current, card.pending, card.busy, [(one.instance, bool(one.uuid)) for one in card.instances])
        for index, card in cards.items()
    }
    return reported.partitioning.plan, reported.partitioning.spec, reported.planned, observed, in_use


def _card_slices(index: int, card: MigCard, *, only_busy: bool = False) -> list[Slice]:
    """Return the instances of the card that pods can request; with `only_busy`, only those on which processes run."""
    return [
        Slice(index, one.instance.start, one.instance.profile, one.uuid)
        for one in card.instances
        if one.uuid and read_name(one.instance.profile) == one.instance.profile and (one.busy or not only_busy)
    ]


def _usable_slices(cards: Cards) -> Collection[Slice]:
    return [s for index, card in sorted(cards.items()) for s in _card_slices(index, card)]


def _initial_state(reported: NodeSlices, cards: Cards) -> Instances:
    """Return the last good state for an agent that starts.

    It consists of the slices that the Node reports, and of those existing instances that fit beside them.
    """
    good: Instances = {}
    for index, card in cards.items():
        of_card = sorted(s.instance for s in reported.existing if s.card == index)
        good[index] = placeable_instances(card.layout, [*of_card, *sorted(existing_instances(card))])
    return good


def _in_use(reported: NodeSlices, cards: Cards, users: Users) -> Instances:
    """Return the instances that must stay: those on which processes run, and those that pods use.

    After a reboot, instances that pods use are missing. A missing instance must exist again if the plan contains it, or
    if it fits beside the existing instances. Otherwise it is left out, because an instance in its place may already
    belong to another pod.
    """
    in_use: Instances = {}
    for index, card in cards.items():
        current = existing_instances(card)
        planned = {s.instance for s in reported.planned or () if s.card == index}
        busy = {one.instance for one in card.instances if one.busy}
        with_pod = {place.instance for place in users if place.card == index}
        order = [*sorted(busy), *sorted((with_pod & current) - busy)]
        if card.layout is not None:
            missing = sorted(with_pod - current)
            order += [i for i in missing if i in planned or not invalid_reason(card.layout, {*current, i})]
        in_use[index] = placeable_instances(card.layout, order)
    return in_use
