"""With `reasons_if_passing` the filter names few amounts, unless no node passes."""

import pytest

from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.decisions.filter import Filter
from tests import builders as b
from tests.scheduler.fake import SETTINGS, Replica, cluster


@pytest.mark.parametrize(("most", "free"), [(2, False), (2, True), (3, True)])
def test_amounts_are_left_out_if_a_node_passes_and_the_reasons_are_many(most: int, free: bool) -> None:
    replica = Replica(cluster(*((f"n{i}", 1) for i in range(4))))
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    for i in range(3 if free else 4):
        replica.api.put("pods", b.share(f"p{i}", 60 + i, annotations=record, node=f"n{i}"))
    replica.deliver()
    pod = read_gpu_pod(b.share("q", 60), SETTINGS)
    assert pod is not None
    found = Filter(replica.state, SETTINGS, reasons_if_passing=most).filter(pod, [f"n{i}" for i in range(4)])
    assert found.passed == (["n3"] if free else [])
    assert len(found.failed) == 4 - len(found.passed)
    assert all(("short)" in reason and "percent" in reason) != (free and most == 2) for reason in found.failed.values())
