"""A client of the API server that returns decoded JSON.

All processes and all commands that read a cluster use it. In a pod it connects by the pod's service account, and
otherwise it takes configuration, credentials and transport from the kubernetes package. It does not use the package's
typed models, which need more time and memory than all other work of mgpu. `mgpu.model` reads the objects.
"""

from mgpu.kube.client import MERGE_PATCH, Api, ApiError, Unreachable

__all__ = ["MERGE_PATCH", "Api", "ApiError", "Unreachable"]
