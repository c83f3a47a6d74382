"""How many examples a property test tries."""

import gc
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

MODE = os.environ.get("MGPU_TEST_EXAMPLES", "normal")
SOAK = MODE == "soak"
SOAK_EXAMPLES = 20_000
_ROUNDS = 20
"""In how many runs of hypothesis `make soak` tries the examples of a state machine."""


def examples(normal: int, steps: int = 50) -> settings:
    """`@examples(200)`: so many in a normal run, SOAK_EXAMPLES in `make soak`. steps: of a state machine's example."""
    return settings(max_examples=SOAK_EXAMPLES if SOAK else normal, stateful_step_count=2 * steps if SOAK else steps)


def machine_test(machine: type[RuleBasedStateMachine], normal: int, steps: int = 50) -> Any:
    """Return the TestCase of a state machine: `TestCluster = machine_test(Cluster, 200)`.

    Hypothesis keeps the choices of all examples of a run, and the structure of 10,000 of them, of which each takes
    150 KB for a machine. So a soak consists of several runs, and gigabytes of memory are not needed.
    """
    case: Any = machine.TestCase
    case.settings = examples(normal, steps)
    if SOAK:
        case.settings = settings(case.settings, max_examples=SOAK_EXAMPLES // _ROUNDS)
        case.runTest = _in_rounds(case.runTest)
    return case


def _in_rounds(run: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(run)  # Hypothesis has attributes of the function.
    def rounds(self: Any) -> None:
        for _ in range(_ROUNDS):
            run(self)
            gc.collect()

    return rounds
