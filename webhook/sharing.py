"""The folder in which the workers' metrics lie. Not in `webhook.admission_metrics`, which must not be imported before
it is made: prometheus_client decides when it is imported whether it counts in files.
"""

import os
from contextlib import ExitStack

from mgpu.serving.folder import temporary

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def folder(stack: ExitStack) -> str:
    """A new one, of which prometheus_client is told; `stack` removes it."""
    made = os.environ[_VARIABLE] = temporary(stack, "mgpu-metrics-")
    return made
