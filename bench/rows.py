"""What a section of the benchmark returns: one `Row` for each figure.

A section is a module of this package that is named in `bench/sections.py` and has a function
`rows(options: Options) -> Iterable[Row]`. The first line of its docstring is its title. It prints nothing;
`bench/tables.py` renders the rows, and `bench/history.py` stores them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        what: What was measured, under which conditions. It is unique in the section and the same in every run, because
            `bench/compare` finds the figures of two runs by it.
        unit: The unit of all figures of the row. The unit of CPU time is `ms CPU` or `s CPU`.
        reference: The same figure of what mgpu is compared with, or None if there is nothing.
        reference_name: With what mgpu is compared. The no-op processes answer the same calls and decide nothing.
        peer: The same figure of the peer that MGPU_BENCH_PEER names, or None if it was not measured.
        more_is_better: Whether a higher value is better than a lower one.
        remark: What else a reader wants to know. Nothing reads figures from it.
    """

    what: str
    value: float
    unit: str
    reference: float | None = None
    reference_name: str = "no-op"
    peer: float | None = None
    more_is_better: bool = False
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """The value divided by the reference."""
        return self.value / self.reference if self.reference else None

    @property
    def peer_ratio(self) -> float | None:
        """The value divided by that of the peer."""
        return self.value / self.peer if self.peer else None


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line requests of all sections.

    Attributes:
        nodes: The numbers of nodes to measure with. If it is empty, each section uses its own.
        quick: Whether to measure less often. The figures of a quick run vary more.
    """

    nodes: tuple[int, ...] = ()
    quick: bool = False

    def sizes(self, *usual: int) -> tuple[int, ...]:
        return self.nodes or usual

    def repeats(self, usual: int) -> int:
        """Return how often to repeat a measurement: a fifth as often in a quick run."""
        return max(1, usual // 5) if self.quick else usual

    def seconds(self, usual: float) -> float:
        return usual / 5 if self.quick else usual


class Skipped(Exception):
    """A section cannot be measured here. The message says what is missing."""
