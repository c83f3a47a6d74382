"""How hard hypothesis tries: `MGPU_TEST_EXAMPLES=soak` (make soak) for many more examples than in a normal run."""

import os

from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("normal", deadline=None, suppress_health_check=_quiet, print_blob=True)
settings.register_profile("soak", settings.get_profile("normal"), max_examples=20_000, stateful_step_count=100)
settings.load_profile(os.environ.get("MGPU_TEST_EXAMPLES", "normal"))
