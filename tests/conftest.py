"""How hard hypothesis tries: `MGPU_TEST_EXAMPLES=soak` (make soak) for many more examples than in a normal run.

A test that says itself how many uses `tests.examples.examples`: a bare `settings(max_examples=...)` would hold in both.
"""

from hypothesis import HealthCheck, settings

from tests.examples import SOAK, SOAK_EXAMPLES

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("normal", deadline=None, suppress_health_check=_quiet, print_blob=True)
settings.register_profile("soak", settings.get_profile("normal"), max_examples=SOAK_EXAMPLES, stateful_step_count=100)
settings.load_profile("soak" if SOAK else "normal")
