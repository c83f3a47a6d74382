"""How hypothesis looks for examples. A normal run tries the same ones every time: it says whether a change broke
something, not whether luck ran out. `MGPU_TEST_EXAMPLES=fresh` tries others, `soak` (make soak) many others.

A test that says itself how many uses `tests.examples.examples`: a bare `settings(max_examples=...)` would hold in all.
"""

from hypothesis import HealthCheck, settings

from tests.examples import MODE, SOAK_EXAMPLES

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fresh", deadline=None, suppress_health_check=_quiet, print_blob=True)
settings.register_profile("normal", settings.get_profile("fresh"), derandomize=True, max_examples=50)
settings.register_profile("soak", settings.get_profile("fresh"), max_examples=SOAK_EXAMPLES, stateful_step_count=100)
settings.load_profile(MODE)
