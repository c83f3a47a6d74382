"""How many examples a property test tries."""

import gc
import logging
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

    It needs no gigabytes of memory, however many examples there are. Hypothesis keeps the choices of all examples of a
    run, and the structure of 10,000 of them, of which each takes 150 KB for a machine. So a soak consists of several
    runs. pytest keeps all log records of a test, and with them the errors that they name, the tracebacks of these, and
    the whole clusters to which the tracebacks refer. So nothing is logged.
    """
    case: Any = machine.TestCase
    case.settings = examples(normal, steps)
    rounds = _ROUNDS if SOAK else 1
    if SOAK:
        case.settings = settings(case.settings, max_examples=SOAK_EXAMPLES // _ROUNDS)
    run: Callable[[Any], None] = case.runTest

    @wraps(run)  # Hypothesis has attributes of the function.
    def run_all(self: Any) -> None:
        logging.disable()
        try:
            for _ in range(rounds):
                run(self)
                gc.collect()
        finally:
            logging.disable(logging.NOTSET)

    case.runTest = run_all
    return case
