"""`mgpu simulate`: the whole pipeline over files, without a cluster (docs/design/simulate.md).

Pods go through the same functions that mgpu's three processes call; only kube-scheduler is replaced.
"""

from playground.simulate.simulate_command import command

__all__ = ["command"]
