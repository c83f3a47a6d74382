"""The playground's API server, which serves the Kubernetes API from memory in one process.

`playground.cluster`, benchmarks and tests start it. The clients that the project uses cannot tell it from a real
kube-apiserver, apart from these differences:

- RBAC applies only to the users of the argument `restricted`. All other users may do everything.
- There are no controllers. The server itself empties a deleted namespace, and computes the used quota from the pods.
- Evictions ignore PodDisruptionBudgets.
- Server-side apply has neither conflicts nor `managedFields`.
- Protobuf bodies are read only for the kinds that kubectl sends as protobuf. Streamed lists (`sendInitialEvents`) are
  refused.
- Neither the Node authorizer nor NodeRestriction apply to nodes, so a kubelet may read and write every ResourceClaim
  and ResourceSlice. ValidatingAdmissionPolicies are not served.
- Only version v1 of `resource.k8s.io` is served, without DeviceTaintRules. Quotas do not count devices.
- `resize` and `ephemeralcontainers` are not served. Services get no address, and pod templates get no defaults.
- OpenAPI documents contain only what clients look up before they write.
"""

from playground.apiserver.api_server import ApiServer, Served, running
from playground.apiserver.authorization import Request
from playground.apiserver.calls import User
from playground.apiserver.hosting import self_signed, write_kubeconfig

__all__ = ["ApiServer", "Request", "Served", "User", "running", "self_signed", "write_kubeconfig"]
