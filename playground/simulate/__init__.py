"""`mgpu simulate`: the whole pipeline over files, without a cluster (spec page simulate.md).

Pods go through the very functions that the three processes call; only kube-scheduler is stood in for.
"""

from playground.simulate.command import command

__all__ = ["command"]
