"""A client of the API server in raw JSON, with the kubernetes package's configuration, credentials and transport.

The package's typed models would cost more time and memory than all of mgpu's own work: a list of 40,000 pods becomes
40,000 object trees. mgpu reads what it needs of an object once, in `mgpu.model`.
"""

from mgpu.kube.client import MERGE_PATCH, Api, ApiError, Unreachable

__all__ = ["MERGE_PATCH", "Api", "ApiError", "Unreachable"]
