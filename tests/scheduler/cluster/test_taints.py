"""The taints that make the kubelet reject the Pod of an MtgpuPod."""

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
def test_toleration_matches_a_taint_as_in_the_kubelet(toleration: dict[str, Any], tolerates: bool) -> None:
    assert untolerated_taint({"tolerations": [toleration]}, [DRAIN]) == (None if tolerates else "drain=now:NoExecute")


def test_untolerated_taint_is_the_first_that_no_toleration_matches() -> None:
    other = {"key": "other", "effect": "NoExecute"}
    assert (
        untolerated_taint({"tolerations": [{"key": "drain", "operator": "Exists"}]}, [DRAIN, other])
        == "other:NoExecute"
    )
    assert untolerated_taint({}, []) is None
    assert untolerated_taint({"tolerations": "all of them"}, [other]) == "other:NoExecute"


def test_evicting_taints_leave_out_default_tolerations_and_other_effects() -> None:
    passing = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    scheduling = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    assert evicting_taints({"spec": {"taints": [passing, scheduling, DRAIN]}}) == (DRAIN,)
    assert evicting_taints({"spec": {}}) == ()
