"""The playground's API server: in memory, in one process, and close enough to the real one that clients cannot tell.

Known limits: JSON and YAML only (no protobuf), no RBAC (every known user may do everything), no controllers, no OpenAPI
beyond what clients ask before they write.
"""

from playground.apiserver.attributes import User
from playground.apiserver.certificates import self_signed
from playground.apiserver.kubeconfig import write_kubeconfig
from playground.apiserver.server import ApiServer
from playground.apiserver.threads import running

__all__ = ["ApiServer", "User", "running", "self_signed", "write_kubeconfig"]
