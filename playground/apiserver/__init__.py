"""The playground's API server: in memory, in one process, and close enough to the real one that clients cannot tell.

Where it differs, known and meant: every known user may do everything, but for those that it is told to hold to their
roles; no controllers, but a deleted namespace empties itself and quotas are charged from what is there; server-side
apply knows no conflicts and no `managedFields`; protobuf only in the few kinds that kubectl writes so; streamed lists
(`sendInitialEvents`) are declined; `resize` and `ephemeralcontainers` are not served; services get no address,
workloads' templates no defaults; OpenAPI only as far as clients ask for it before they write.
"""

from playground.apiserver.attributes import User
from playground.apiserver.authorization import Request
from playground.apiserver.certificates import self_signed
from playground.apiserver.kubeconfig import write_kubeconfig
from playground.apiserver.server import ApiServer
from playground.apiserver.threads import Served, running

__all__ = ["ApiServer", "Request", "Served", "User", "running", "self_signed", "write_kubeconfig"]
