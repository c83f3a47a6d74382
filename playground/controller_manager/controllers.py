"""Starts and stops all controllers."""

from mgpu.kube import Api
from playground.controller_manager.garbage_collection import GarbageCollection
from playground.controller_manager.pod_claims import PodClaims


class ControllerManager:
    """Runs the controllers, each in its own thread. It may be started once, after the API server serves all kinds.

    Args:
        api: The client of the API server.
        node_seconds: The time in seconds between the deletion of a node and the deletion of its pods.
    """

    def __init__(self, api: Api, node_seconds: float = 1.0) -> None:
        self._controllers = (GarbageCollection(api, node_seconds), PodClaims(api))

    def start(self) -> None:
        for controller in self._controllers:
            controller.start()

    def stop(self) -> None:
        for controller in self._controllers:
            controller.stop()
