"""The protocol of the isolation back ends, which hold containers to their shares of cards.

`isolation.isolation` chooses a back end for each container and calls it. The packages `isolation.mps`,
`isolation.hami_core` and `isolation.driver` implement the protocol, and
`tests/deviceplugin/isolation/test_contract.py` runs the same tests on all of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.delivery.cdi import Edits
from deviceplugin.isolation.limits import LimitedContainer

Key = tuple[str, str]
"""The UID of a pod, and the name of one of its containers."""


@dataclass(frozen=True, slots=True)
class Ability:
    """What a back end can hold containers to on this node.

    Attributes:
        memory: Whether it limits memory.
        compute: Whether it limits compute.
        several_cards: Whether it limits a container that has shares of several cards.
        resizable: Whether it can change the limits of a running container.
        sharable: Whether several containers can have one set of limits together, as those of a ResourceClaim.
        caution: What a user of the node should know of this ability, in a clause without a final period; "" if there is
            nothing. `mgpu doctor` shows it.
    """

    memory: bool
    compute: bool
    several_cards: bool
    resizable: bool = False
    sharable: bool = True
    caution: str = ""


@dataclass(frozen=True, slots=True)
class Unable:
    """A back end cannot do on this node, or for this container, what it is asked to do. `reason` is a clause."""

    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What a container uses of one card.

    Attributes:
        key: The container.
        card: The UUID of the card.
        memory: The used memory in bytes; None if the back end does not measure it.
        sm: The utilization of the card's SMs by the container, from 0 to 1; None if it is not measured.
        memory_limit: The limit in bytes that is in force; None if there is none, or if it is unknown.
    """

    key: Key
    card: str
    memory: int | None = None
    sm: float | None = None
    memory_limit: int | None = None


class Backend(Protocol):
    """One way of holding containers to their shares. Use it on one event loop, except where documented otherwise.

    A back end outlives neither the agent nor its containers' limits: the next agent calls `recover`, and finds the
    containers by their CDI files, which contain the variable `isolation.isolation.VARIABLE`.
    """

    @property
    def name(self) -> str:
        """The name of the back end (`mgpu.model.isolation`)."""

    def ability(self) -> Ability | Unable:
        """Return what the back end can do on this node now. Thread-safe; the call does not block."""

    async def prepare(self, containers: Sequence[LimitedContainer], deadline: float) -> Mapping[Key, Edits]:
        """Return what the runtime must add to these containers, once all that the limits need is in place.

        The facade only passes containers whose limits the back end can hold at least partly (`ability`). The edits take
        precedence over the pod's own variables and mounts.

        Args:
            deadline: The time of the event loop's clock until which the call may wait.

        Raises:
            Refused: A container must not start without its limits.
        """

    def lift(self, variables: Iterable[str]) -> Mapping[str, str]:
        """Return values with which these variables limit nothing; those that are not named limit nothing anyway.

        A container with a whole ResourceClaim also gets the variables of the single requests, and cannot unset them.

        Args:
            variables: The names of variables in edits of `prepare`.
        """

    def mark_started(self, keys: Iterable[Key]) -> None:
        """Record that these containers, which were prepared, may start now."""

    def release(self, keys: Collection[Key]) -> None:
        """Forget these containers, which start again under another back end or under none."""

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget the containers of all pods except those with these UIDs."""

    def recover(self, environments: Mapping[Key, Mapping[str, str]]) -> None:
        """Find the containers of earlier agents.

        Args:
            environments: The environments in the CDI files of the containers that this back end limits.
        """

    async def run(self) -> None:
        """Do the work that goes on while containers run, until cancelled. Return at once if there is none."""

    async def resize(self, container: LimitedContainer) -> Unable | None:
        """Change the limits of a running container. Return why that is not possible, or None if it is done."""

    def measure(self) -> Sequence[Measured]:
        """Return what containers use, as far as the back end knows it. It may block; call it on a thread."""
