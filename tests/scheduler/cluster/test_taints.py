"""Which taints of a node keep the Pod of an MtgpuPod away."""

from typing import Any

import pytest

from scheduler.cluster.taints import evicting_taints, untolerated_taint

DRAIN = {"key": "drain", "value": "now", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "drain", "operator": "Exists", "effect": "NoExecute"}, True),
        ({"key": "drain", "value": "now", "tolerationSeconds": 60}, True),
        ({"key": "drain", "operator": "Equal", "value": "then"}, False),
        ({"key": "drain"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "drain", "operator": "Exists", "effect": "NoSchedule"}, False),
        ({"key": "drain", "operator": "Gt", "value": "5"}, True),
        ({"value": "now"}, False),
    ],
    ids=str,
)
def test_a_toleration_is_read_as_the_kubelet_does(toleration: dict[str, Any], tolerates: bool) -> None:
    assert untolerated_taint({"tolerations": [toleration]}, [DRAIN]) == (None if tolerates else "drain=now:NoExecute")


def test_all_must_be_tolerated_and_the_first_that_is_not_is_named() -> None:
    other = {"key": "other", "effect": "NoExecute"}
    assert (
        untolerated_taint({"tolerations": [{"key": "drain", "operator": "Exists"}]}, [DRAIN, other])
        == "other:NoExecute"
    )
    assert untolerated_taint({}, []) is None
    assert untolerated_taint({"tolerations": "all of them"}, [other]) == "other:NoExecute"


def test_what_passes_and_what_only_the_scheduler_heeds_does_not_count() -> None:
    passing = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    scheduling = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    assert evicting_taints({"spec": {"taints": [passing, scheduling, DRAIN]}}) == (DRAIN,)
    assert evicting_taints({"spec": {}}) == ()
