"""The API server, spoken to in raw JSON: the kubernetes client's configuration, credentials and transport, no models.

Typed models cost more time and memory than all of mgpu's own work (a list of 40,000 pods becomes 40,000 object trees);
what mgpu needs of an object is read once by `mgpu.model`.
"""

from mgpu.kube.client import MERGE_PATCH, Api, ApiError, Unreachable

__all__ = ["MERGE_PATCH", "Api", "ApiError", "Unreachable"]
