"""The stored part of pods that have ended: a cluster keeps 12,500 of them, which no quota counts."""

import pickle

from scheduler.cluster.gpu_pods import read_gpu_pod, trim
from tests import builders as b
from tests.scheduler.fake import SETTINGS


def test_trim_reduces_an_ended_pod_to_a_few_hundred_bytes() -> None:
    """What its 200 containers had asked for had cost 80 KiB, until the pod was deleted."""
    names = [f"c{i}-{'x' * 30}" for i in range(200)]
    raw = b.pod("p", *(b.container(name, 1, 256) for name in names), node="n1", phase="Failed")
    raw["status"]["containerStatuses"] = [{"name": name, "containerID": "x"} for name in names]
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    assert len(pickle.dumps(known)) > 15_000
    small = trim(known)
    assert len(pickle.dumps(small)) < 1_000
    assert (small.pod.key, small.pod.uid, small.dialect) == ("default/p", "uid-p", "mgpu")
