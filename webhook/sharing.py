"""The folder in which the workers' metrics lie. Not in `webhook.metrics`, which must not be imported before it is made:
prometheus_client decides when it is imported whether it counts in files.
"""

import os
import shutil
import tempfile
from contextlib import ExitStack

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def folder(stack: ExitStack) -> str:
    """A new one, of which prometheus_client is told. stack: where it is removed again, by this process alone: workers
    leave by way of it too.
    """
    made, owner = tempfile.mkdtemp(prefix="mgpu-metrics-"), os.getpid()
    stack.callback(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    os.environ[_VARIABLE] = made
    return made
