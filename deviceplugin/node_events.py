"""Writes Kubernetes Events about the node and its pods.

The other parts of the agent write their Events through `NodeState.events`.
"""

import logging
from typing import Protocol

from deviceplugin.pods.gpu_pod import GpuPod
from mgpu.kube.events import Recorder, node_reference, pod_reference

log = logging.getLogger(__name__)


class NamedPod(Protocol):
    """A pod that is not a `GpuPod`."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...


class NodeEvents:
    """A writer of Events, which sends them in the background. Thread-safe."""

    def __init__(self, recorder: Recorder, node: str) -> None:
        self._recorder = recorder
        self._node = node

    def warn_node(self, problem: str, reason: str = "MgpuCards") -> None:
        """Write an Event of the Node with this reason, and log the problem."""
        log.warning("%s", problem, extra={"node": self._node})
        self._recorder.warn(node_reference(self._node), reason, problem)

    def warn_pod(self, gpu_pod: GpuPod, problem: str, reason: str) -> None:
        """Write an Event of the pod. The problem is not logged here, because the plugin server logs refused starts."""
        pod = gpu_pod.pod
        self._recorder.warn(pod_reference(pod.namespace, pod.name, pod.uid), reason, problem)

    def warn_named_pod(self, pod: NamedPod, problem: str, reason: str) -> None:
        """Write an Event of the Pod of an MtgpuPod, or of a pod with ResourceClaims."""
        self._recorder.warn(pod_reference(pod.namespace, pod.name, pod.uid), reason, problem)

    def stop(self) -> None:
        self._recorder.stop()
