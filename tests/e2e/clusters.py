"""Clusters that a slow machine does not change."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mgpu.kube.client import JSON_PATCH
from playground.cluster import Cluster
from playground.nodes import NodeSpec

_BINDINGS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/mgpu-scheduler"


@contextmanager
def patient(nodes: Sequence[NodeSpec], **options: Any) -> Iterator[Cluster]:
    """A cluster whose bindings wait for our admission, and whose kubelets try again soon.

    Beside other work a machine may need more than the one second that a binding is given; then it would be let through,
    and the pod's cards decided late. options: as of `Cluster`.
    """
    with Cluster(nodes, **{"kubelet": {"retry_seconds": 0.2}, **options}) as cluster:
        cluster.api.patch(_BINDINGS, [{"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 10}], JSON_PATCH)
        yield cluster
