"""How much work the engine may do, counted in steps.

The engine has no clock: it counts elementary work, so that the same pod on the same cards gets the same answer on every
machine and every replica, however busy they are. A step is a quarter to half a microsecond of CPU time of a current
server core. The costs that the modules charge are measured (`python -m bench.hard`) and rounded up; they cover the
setup of a search as well as the search itself, since a pod of many different containers spends most there.
"""

from collections.abc import Callable
from dataclasses import dataclass

STEPS_PER_MILLISECOND = 4_000

_CHECK_EVERY = 4_000
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """The most steps that one `place` takes: for the exact search, and for finding any placement where that ends.

    What cannot be left out, which is linear in containers × cards, comes on top.
    """

    search: int
    fallback: int


FULL = Limits(600_000, 200_000)
"""Some 0.2 s. Eight containers on 16 cards take 1,000 to 200,000 steps."""

SHORT = Limits(80_000, 80_000)
"""Some 40 ms. Whatever takes at most so much is as good as with FULL."""

BRIEF = Limits(10_000, 10_000)
"""Some 5 ms, where a lock is held or many such questions are asked."""

QUICK = Limits(0, 80_000)
"""Some 1 ms where something fits: without a search for the best."""

LEAST = Limits(2_000, 2_000)
"""Some 1 ms, for those who have had far more than their share."""


class Exhausted(Exception):
    """A search has used up its budget. The engine catches it; callers of `place` never see it."""


def _go_on(_spent: int) -> None:
    """A checkpoint that ends nothing."""


class Effort:
    """Count the steps of all searches that one caller asks for. Not thread-safe.

    checkpoint: called about once a millisecond with the steps spent so far. It may rest, so that other threads run,
    and it may raise to end the work for a caller that is gone. It must not change what a search finds: a search that
    goes on after a checkpoint gives the same answer as one without.
    """

    __slots__ = ("_checkpoint", "_next", "spent")

    def __init__(self, checkpoint: Callable[[int], None] = _go_on) -> None:
        self.spent = 0
        self._checkpoint = checkpoint
        self._next = _CHECK_EVERY

    def spend(self, steps: int) -> None:
        self.spent += steps
        if self.spent >= self._next:
            self._next = self.spent + _CHECK_EVERY
            self._checkpoint(self.spent)


class Budget:
    """The steps that one search may take of a caller's effort."""

    __slots__ = ("effort", "left")

    def __init__(self, effort: Effort, steps: int) -> None:
        self.effort = effort
        self.left = steps

    def take(self, steps: int) -> None:
        """Charge these steps. Raises Exhausted where fewer are left; they are charged before the work is done."""
        if steps > self.left:
            self.left = 0
            raise Exhausted
        self.left -= steps
        self.effort.spend(steps)

    def beyond(self) -> "Budget":
        """Return a budget for work that cannot be left out: it counts for the caller, and it never ends."""
        return Budget(self.effort, _UNBOUNDED)

    def part(self, steps: int) -> "Budget":
        """Set so many of the steps that are left aside; `give_back` what of them is not needed."""
        steps = min(steps, self.left)
        self.left -= steps
        return Budget(self.effort, steps)

    def give_back(self, part: "Budget") -> None:
        self.left += part.left
        part.left = 0


def full_budget() -> Budget:
    """Return the steps of one full search, for a caller that keeps nobody waiting."""
    return Budget(Effort(), FULL.search)
