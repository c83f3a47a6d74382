"""Events of the node and of its pods, each also a line in the log."""

import logging

from deviceplugin.pods.gpu_pod import GpuPod
from mgpu.kube.events import Recorder, node_reference, pod_reference

log = logging.getLogger(__name__)


class NodeEvents:
    """Writes Events in the background. Thread-safe."""

    def __init__(self, recorder: Recorder, node: str) -> None:
        self._recorder = recorder
        self._node = node

    def warn_node(self, problem: str, reason: str = "MgpuCards") -> None:
        """Warn of a problem of the node as a whole."""
        log.warning("%s", problem, extra={"node": self._node})
        self._recorder.warn(node_reference(self._node), reason, problem)

    def warn_pod(self, gpu_pod: GpuPod, problem: str, reason: str) -> None:
        """Warn of a problem of one pod. The plugin server logs refused starts, so this does not."""
        pod = gpu_pod.pod
        self._recorder.warn(pod_reference(pod.namespace, pod.name, pod.uid), reason, problem)

    def stop(self) -> None:
        """Write no further Events."""
        self._recorder.stop()
