"""Limits the work of the engine, counted in steps.

`scheduler.decisions.effort_budgets` creates an `Effort` for each call and chooses the `Limits`; the nominations and the
preemption choose limits of their own. The engine has no clock. It counts elementary work, so that the same pod on the
same cards gets the same answer on every machine and every replica, however busy they are. A step takes a quarter to
half a microsecond on one core of a current server.

The steps that the modules charge are measured (`python -m bench.hard`) and rounded up. They must also cover the setup
of a search, which takes most of the time for a pod of many different containers.
"""

from collections.abc import Callable
from dataclasses import dataclass

STEPS_PER_MILLISECOND = 4_000

_CHECK_EVERY = 4_000
"""The steps between two calls of a checkpoint."""
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call of `place`, in steps.

    `place` may take more steps in total, because it may repeat a search with lower limits, and because it also does
    work that is linear in containers × cards.

    Attributes:
        search: The maximum number of steps of the exact search.
        fallback: The maximum number of steps of the search for any placement, which follows if the exact search reaches
            its limit without a result.
    """

    search: int
    fallback: int


FULL = Limits(600_000, 200_000)
"""About 0.2 s. Eight containers on 16 cards take 1,000 to 200,000 steps."""

SHORT = Limits(80_000, 80_000)
"""About 40 ms. A result that is proven within these limits is also the result of a search with FULL."""

BRIEF = Limits(10_000, 10_000)
"""About 5 ms, for work under a lock or for many searches in a row."""

QUICK = Limits(0, 80_000)
"""About 1 ms if something fits, without a search for the best placement."""

LEAST = Limits(2_000, 2_000)
"""About 1 ms, for namespaces that have used up their allowance and their debt (`effort_budgets`)."""


class Exhausted(Exception):
    """A search has used up its budget or reached another limit. `place` and `assess` never raise this error."""


def _continue(_spent: int) -> None:
    """A checkpoint that always continues."""


class Effort:
    """The steps of all searches of one caller. Not thread-safe.

    Args:
        checkpoint: A function that is called about once a millisecond with the steps spent so far. It may sleep, so
            that other threads run, or raise an exception to end the work.
    """

    __slots__ = ("_checkpoint", "_next_checkpoint", "spent")

    def __init__(self, checkpoint: Callable[[int], None] = _continue) -> None:
        self.spent = 0
        self._checkpoint = checkpoint
        self._next_checkpoint = _CHECK_EVERY

    def spend(self, steps: int) -> None:
        """Count steps without a limit."""
        self.spent += steps
        if self.spent >= self._next_checkpoint:
            self._next_checkpoint = self.spent + _CHECK_EVERY
            self._checkpoint(self.spent)


class Budget:
    """The steps that one search may take. They also count as the effort of the caller."""

    __slots__ = ("effort", "left")

    def __init__(self, effort: Effort, steps: int) -> None:
        self.effort = effort
        self.left = steps

    def take(self, steps: int) -> None:
        """Charge steps before the work is done. If fewer are left, raise Exhausted and leave none."""
        if steps > self.left:
            self.left = 0
            raise Exhausted
        self.left -= steps
        self.effort.spend(steps)

    def beyond(self) -> "Budget":
        """Return a budget without a limit, for work that must be done."""
        return Budget(self.effort, _UNBOUNDED)

    def part(self, steps: int) -> "Budget":
        """Move at most this many steps into a new budget. `give_back` returns those that are not used."""
        steps = min(steps, self.left)
        self.left -= steps
        return Budget(self.effort, steps)

    def give_back(self, part: "Budget") -> None:
        """Take back the unused steps of a `part`."""
        self.left += part.left
        part.left = 0


def full_budget() -> Budget:
    """Return the budget of one full search, for a caller without limits of its own."""
    return Budget(Effort(), FULL.search)
