"""A kubelet for one node of the playground. To the API server and to device plugins it behaves like a real one.

`playground.cluster` runs one for each node. It runs no containers: `playground.container_runtime` records what would
run. It does not implement volumes, probes, images, static pods, eviction, cgroups and the topology manager.
"""

from playground.kubelet.dra import DraConfig
from playground.kubelet.kubelet import Kubelet
from playground.kubelet.node import KubeletConfig

__all__ = ["DraConfig", "Kubelet", "KubeletConfig"]
