"""The MIG cards of one node as its agent's driver finds them, without an NVML in between (tests/deviceplugin/mig):
strict about what lies where and what is in use, and each change can fail before, half way through, or after.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from deviceplugin.mig.mig_driver import MigCard, MigInstance, MigRefused
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, invalid_reason, layout_of
from mgpu.model.slice_names import Slice

Change = Callable[[], object]
How = Literal["before", "half", "after"]


class Crash(BaseException):
    """The process is killed; nothing of it runs on."""


class MigCards:
    """What is there outlives its agents. made: by card and instance, the UUID of the MIG device, "" half made.

    left: changes that go well; None: all. Then one fails: the agent ends (if `error` is None) or gets `error`.
    """

    def __init__(self, gpus: Sequence[Card]) -> None:
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.made: dict[str, dict[Instance, str]] = {gpu.uuid: {} for gpu in gpus}
        self.modes = dict.fromkeys(self.made, False)
        self.clients: dict[str, set[int]] = {}
        self.destroyed_in_use: list[str] = []
        self._serial = 0
        self.fail(None)

    def fail(self, left: int | None, how: How = "before", error: type[MigRefused | RetryLater] | None = None) -> None:
        self.left, self.how, self.error = left, how, error

    def reboot(self) -> None:
        self.clients.clear()
        for instances in self.made.values():
            instances.clear()

    def whole(self) -> dict[Slice, str]:
        """The instances that pods can use, by place."""
        return {
            Slice(self.gpus[card].index, *instance): uuid
            for card, instances in self.made.items()
            for instance, uuid in instances.items()
            if uuid
        }

    # The driver.

    def read(self) -> tuple[MigCard, ...]:
        return tuple(self._read(uuid) for uuid in self.gpus)

    def _read(self, card: str) -> MigCard:
        on = self.modes[card]
        made = tuple(MigInstance(i, uuid, bool(self.clients.get(uuid))) for i, uuid in sorted(self.made[card].items()))
        return MigCard(card, True, on, on, self._layout(card), made, any(m.busy for m in made))

    def create(self, uuid: str, instance: Instance) -> MigInstance:
        made = self.made[uuid]
        if not made.get(instance):
            beside = [other for other in made if other != instance]
            if not self.modes[uuid] or invalid_reason(self._layout(uuid), [*beside, instance]):
                raise MigRefused(f"{instance} has no place on {uuid}")
            self._step(lambda: made.setdefault(instance, ""), lambda: made.update({instance: self._uuid()}))
        return MigInstance(instance, made[instance], False)

    def destroy(self, uuid: str, instance: Instance) -> None:
        made = self.made[uuid]
        if instance not in made:
            return
        if self.clients.get(made[instance]):
            self.destroyed_in_use.append(made[instance])
            raise MigRefused(f"{instance} on {uuid} is in use")
        self._step(lambda: made.update({instance: ""}), lambda: made.pop(instance, None))

    def set_mode(self, uuid: str, *, on: bool) -> str | None:
        self._step(lambda: None, lambda: self.modes.update({uuid: on}))
        return None

    def _step(self, half: Change, whole: Change) -> None:
        if self.left is None or self.left > 0:
            self.left = None if self.left is None else self.left - 1
            half()
            whole()
            return
        if self.how != "before":
            half()
        if self.how == "after":
            whole()
        if self.error is None:
            raise Crash
        self.left, error = None, self.error
        raise error("NVML has failed")

    def _uuid(self) -> str:
        self._serial += 1
        return f"MIG-{self._serial}"

    def _layout(self, card: str) -> Layout:
        layout = layout_of(self.gpus[card].model, self.gpus[card].memory)
        assert layout is not None
        return layout
