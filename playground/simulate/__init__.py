"""`mgpu simulate`: places the pods of files without a cluster (docs/design/simulate.md).

The entry point in pyproject.toml leads to `command`. Pods go through the functions that mgpu's three processes call;
only kube-scheduler is replaced, by `playground.fit`.
"""

from playground.simulate.simulate_command import command

__all__ = ["command"]
