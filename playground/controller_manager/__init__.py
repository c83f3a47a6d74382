"""Controllers of kube-controller-manager: the garbage collectors, and the controller of the pods' ResourceClaims.

`playground.cluster` starts them, also for a real API server.
"""

from playground.controller_manager.controllers import ControllerManager

__all__ = ["ControllerManager"]
