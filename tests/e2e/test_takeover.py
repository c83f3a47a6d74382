"""Koordinator's upgrade webhook on the whole chain: whose scheduler new GPU pods get, and who may bind them."""

from pathlib import Path

import pytest

from mgpu.kube import ApiError
from playground.nodes import make_nodes
from tests.builders import container, pod
from tests.e2e.bench import Bench, asking
from tests.e2e.clusters import patient
from tests.waiting import until


def test_gpu_pods_are_taken_over_and_others_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mgpu.yaml"
    file.write_text("{webhook: {schedulerName: koord-scheduler}, scheduler: {bindingUsers: [koord-scheduler]}}")
    with patient(make_nodes(1, 2), config=file) as cluster:
        bench = Bench(cluster)
        bench.create(asking("gpu", gpu=50))
        bench.create(pod("plain", container("c")))
        until(lambda: bench.pod("plain").spec.node_name)
        assert bench.pod("gpu").spec.scheduler_name == "koord-scheduler"
        assert not bench.pod("gpu").spec.node_name
        binding = {"metadata": {"name": "gpu"}, "target": {"kind": "Node", "name": "node-1"}}
        for path in ("pods/gpu/binding", "bindings"):
            with pytest.raises(ApiError, match=r"scheduler\.bindingUsers") as refused:
                cluster.api.create(f"/api/v1/namespaces/default/{path}", binding)
            assert refused.value.status == 403
        assert not bench.pod("gpu").spec.node_name
        bench.close()
