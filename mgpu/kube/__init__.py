"""A client of the API server that returns decoded JSON.

It takes configuration, credentials and transport from the kubernetes package, but not its typed models, which need more
time and memory than all other work of mgpu. The processes, the commands and the playground use it. `mgpu.model` reads
the objects.
"""

from mgpu.kube.client import MERGE_PATCH, Api, ApiError, Unreachable

__all__ = ["MERGE_PATCH", "Api", "ApiError", "Unreachable"]
