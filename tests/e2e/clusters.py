"""Starts clusters whose behaviour does not depend on how busy the machine is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mgpu.kube.client import JSON_PATCH
from playground.cluster import Cluster
from playground.nodes import NodeSpec

_BINDINGS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/mgpu-scheduler"


@contextmanager
def patient(nodes: Sequence[NodeSpec], **options: Any) -> Iterator[Cluster]:
    """Start a cluster whose bindings wait for mgpu's admission, and whose kubelets retry soon.

    A busy machine may need longer than the one second after which the API server accepts a binding without admission;
    the scheduler would then decide the pod's cards late. options: those of `Cluster`.
    """
    with Cluster(nodes, **{"kubelet": {"retry_seconds": 0.2}, **options}) as cluster:
        cluster.api.patch(_BINDINGS, [{"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 10}], JSON_PATCH)
        yield cluster
