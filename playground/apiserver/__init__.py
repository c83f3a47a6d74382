"""The playground's API server: in memory, in one process, indistinguishable for the clients that the project uses.

`tests/playground/apiserver` runs the same tests on this server and on a real kube-apiserver. Known differences:

- A user may do everything unless the server restricts the user to RBAC.
- There are no controllers; a deleted namespace empties itself, and quotas are charged from the existing pods.
- Server-side apply knows neither conflicts nor `managedFields`.
- Protobuf bodies are read only for the kinds that kubectl writes so. Streamed lists (`sendInitialEvents`) are declined.
- `resize` and `ephemeralcontainers` are not served. Services get no address, pod templates of workloads no defaults.
- OpenAPI documents contain only what clients look up before they write.
"""

from playground.apiserver.api_server import ApiServer, Served, running
from playground.apiserver.authorization import Request
from playground.apiserver.calls import User
from playground.apiserver.hosting import self_signed, write_kubeconfig

__all__ = ["ApiServer", "Request", "Served", "User", "running", "self_signed", "write_kubeconfig"]
