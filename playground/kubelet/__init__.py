"""A kubelet for one node, for tests and the playground, which the API server and device plugins take for a real one.

It runs no containers: `playground.container_runtime` records what would run. Volumes, probes, images, static pods,
eviction, cgroups and the topology manager are left out.
"""

from playground.kubelet.kubelet import Kubelet
from playground.kubelet.node import KubeletConfig

__all__ = ["Kubelet", "KubeletConfig"]
