"""What is kept of a pod."""

from mgpu.dialects.watched_pods import stored_pod
from mgpu.model.pods import read_pod
from tests import builders as b


def test_containers_that_ask_for_the_same_share_one_table() -> None:
    containers = [b.container(name, 10, 512) for name in ("a", "b")]
    pod = stored_pod(read_pod(b.pod("p", *containers)), record=False)
    one, other = pod.containers
    assert one.requests == containers[0]["resources"]["requests"]
    assert one.requests is other.requests
