"""Defines the explanation of a pod: why it waits, for each node and card, or which cards it has.

`scheduler.decisions.explanation` makes it, and `mgpu explain` shows it. The scheduler sends it to the command as JSON
(`mgpu.presentation.answers`), so it must consist of values that JSON can express.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mgpu.model.cards import CardState
from mgpu.presentation.gang_views import GangView


@dataclass(frozen=True, slots=True)
class CardRow:
    """A card of a node.

    Attributes:
        holders: The other pods that hold a share of the card, each as `namespace/name`.
        reason: The engine's reason against this card, or None if there is none.
        own: Whether the explained object holds a share of the card.
    """

    state: CardState
    holders: tuple[str, ...] = ()
    reason: str | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node for a pod that waits.

    Attributes:
        reason: Why the pod does not fit, or None if it does.
        unresolvable: Whether evicting pods from the node cannot help (kube-scheduler's `UnschedulableAndUnresolvable`).
        repartitionable: Whether the pod would fit if the node's cards were partitioned again.
        points: The score of a node on which the pod fits, 0 to 10.
    """

    name: str
    reason: str | None = None
    unresolvable: bool = False
    repartitionable: bool = False
    points: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of the pod, the waiting state of a container, or the message of the pod's status."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one object.

    Attributes:
        subject: The kind, namespace and name of the object, such as `Pod default/train-0`.
        status: The node, if there is one, and the phase or `Terminating`, such as `Pending` or `on n1, Running`.
        dialect: The dialect of the request, or None if there is no valid request.
        request: The name of each container and a text that describes its request.
        constraints: The constraints of the request, by annotation.
        policy: A text that says how the cards are, or would be, chosen.
        problems: The reasons why the request is invalid.
        verdict: The sentences of the explanation, the most important first.
        nodes: The nodes for a pod that waits: first those on which it fits, by their points, then the others by name.
        conditions: The conditions and messages that other components have written into the object's status.
        cards: The cards of some nodes, by the name of the node.
        gates: The names of the pod's scheduling gates.
        gang: The gang of a pod that waits, if it is not complete.
    """

    subject: str
    status: str
    dialect: str | None = None
    request: tuple[tuple[str, str], ...] = ()
    constraints: Mapping[str, str] = field(default_factory=dict)
    policy: str | None = None
    problems: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    conditions: tuple[Condition, ...] = ()
    cards: Mapping[str, tuple[CardRow, ...]] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    gang: GangView | None = None
