"""One pod and one node: the settings that reach the placement."""

import pytest

from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.pods import read_node
from mgpu.settings import load_settings
from scheduler.engine.node_assessment import assess
from tests.builders import GIB, node, state

VARIED = GpuRequest("mgpu", tuple(ContainerRequest(f"c{i}", core=60 + 10 * i, memory=(3 + i) * GIB) for i in range(10)))


@pytest.mark.parametrize(("most", "proven"), [("", True), ("10", True), ("9", False)])
def test_assess_of_more_containers_than_the_setting_has_capped_search(most: str, proven: bool) -> None:
    text = f"dialects: {{mgpu: {{MGPUMaxContainersNumPolicyValid: {most}}}}}" if most else ""
    found = assess(VARIED, read_node(node()), [state(i, 100 * (i % 3), 5) for i in range(12)], load_settings(text))
    assert isinstance(found, Placement)
    assert found.proven is proven
