"""`mgpu simulate`: places the pods of files without a cluster (docs/design/simulate.md).

Pods go through the functions that mgpu's three processes call. `playground.fit` replaces kube-scheduler.
"""

from playground.simulate.simulate_command import command

__all__ = ["command"]
