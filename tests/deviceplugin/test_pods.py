"""The node's pods as the agent reads them."""

from typing import Any

import pytest

from deviceplugin.pods import GpuPod, NodePods, next_to_start, read_gpu_pod
from mgpu.settings import load_settings
from tests.builders import CORE, MEMORY, container, pod, share

SETTINGS = load_settings()
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}


def read(raw: dict[str, Any]) -> GpuPod:
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    return known


def test_a_pod_without_gpu_is_none_of_ours() -> None:
    assert read_gpu_pod(pod("p", container("c")), SETTINGS) is None


def test_a_pod_whose_parts_are_of_a_wrong_type_is_left_out() -> None:
    assert read_gpu_pod({"metadata": {"uid": "u"}, "spec": []}, SETTINGS) is None


def test_a_record_decides_and_so_does_what_can_never_be_one() -> None:
    assert not read(share()).decided
    assert read(share(annotations=RECORD)).decided
    garbage = read(share(annotations={**RECORD, "vke.volcengine.com/gpu-index-container-c": "x"}))
    assert garbage.decided
    assert "'x' is neither a card index nor a UUID" in garbage.problem
    assert "must be at least 256" in read(pod("p", container("c", 50))).problem


def test_asking_is_in_the_kubelets_order() -> None:
    known = read(pod("p", container("a", 10, 512), container("b"), init=(container("i", 30, 512),)))
    assert [(c.name, amount) for c, amount in known.asking(CORE)] == [("i", 30), ("a", 10)]


def test_a_pod_holds_what_it_needs_at_its_busiest() -> None:
    sidecar = container("s", 10, 500, restartPolicy="Always")
    known = read(pod("p", container("a", 10, 300), container("b", 10, 400), init=(sidecar, container("i", 10, 900))))
    assert known.held[MEMORY] == 1400


def raw_status(name: str, exit_code: int) -> dict[str, Any]:
    return {"initContainerStatuses": [{"name": name, "state": {"terminated": {"exitCode": exit_code}}}]}


def raw_waiting(name: str, reason: str) -> dict[str, Any]:
    return {"initContainerStatuses": [{"name": name, "state": {"waiting": {"reason": reason}}}]}


@pytest.mark.parametrize(
    ("started", "status", "expected"),
    [
        (set(), {}, "i"),
        ({"i"}, {}, None),
        ({"i"}, raw_status("i", 1), "i"),
        ({"i"}, raw_status("i", 0), "c"),
        (set(), raw_status("i", 0), "c"),
        ({"i"}, raw_waiting("i", "CrashLoopBackOff"), "i"),
        ({"i"}, raw_waiting("i", "CreateContainerError"), "i"),
        ({"i"}, raw_waiting("i", "PodInitializing"), None),
    ],
    ids=["first", "runs", "failed", "ended", "after an agent restart", "crashes", "not created", "not seen yet"],
)
def test_of_containers_with_the_same_ids_the_next_one_starts(
    started: set[str], status: dict[str, Any], expected: str | None
) -> None:
    raw = pod("p", container("c", 10, 512), init=(container("i", 10, 512),))
    known = read({**raw, "status": {"phase": "Pending", **status}})
    assert next_to_start(known, {"i", "c"}, started) == expected


def test_the_store_follows_the_watch() -> None:
    changes: list[int] = []
    gone: list[str] = []
    pods = NodePods(SETTINGS, lambda: changes.append(1), gone.append)
    pods.take(share("b"))
    pods.take(share("a"))
    pods.take(pod("none", container("c")))
    assert [known.pod.name for known in pods.all()] == ["a", "b"]
    assert len(changes) == 2
    pods.take(share("a", uid="again"))
    pods.drop(share("a"))
    assert pods.by_uid("again") is pods.get("default", "a")
    pods.drop(share("a", uid="again"))
    assert pods.get("default", "a") is None
    assert gone == ["uid-a", "uid-a", "again"]
