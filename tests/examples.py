"""How many examples a property test tries."""

import os

from hypothesis import settings

MODE = os.environ.get("MGPU_TEST_EXAMPLES", "normal")
SOAK = MODE == "soak"
SOAK_EXAMPLES = 20_000


def examples(normal: int, steps: int = 50) -> settings:
    """`@examples(200)`: so many in a normal run, SOAK_EXAMPLES in `make soak`. steps: of a state machine's example."""
    return settings(max_examples=SOAK_EXAMPLES if SOAK else normal, stateful_step_count=2 * steps if SOAK else steps)
