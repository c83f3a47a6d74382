"""A kubelet for one node, for tests and the one-machine cluster: real to the API server and to device plugins.

Limits: it runs nothing (`playground.runtime` records what would run), and leaves out volumes, probes, images, static
pods, eviction, cgroups and the topology manager.
"""

from playground.kubelet.config import KubeletConfig
from playground.kubelet.kubelet import Kubelet

__all__ = ["Kubelet", "KubeletConfig"]
