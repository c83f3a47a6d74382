"""A kubelet for one node, for tests and the one-machine cluster: real to the API server and to device plugins.

It runs no containers: `playground.runtime` records what would run. Volumes, probes, images, static pods, eviction,
cgroups and the topology manager are left out.
"""

from playground.kubelet.kubelet import Kubelet
from playground.kubelet.node import KubeletConfig

__all__ = ["Kubelet", "KubeletConfig"]
