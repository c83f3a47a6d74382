"""The cache of the pods on this node."""

from typing import Any

from deviceplugin.pods.node_pods import NodePods
from mgpu.settings import load_settings
from tests.builders import container, pod, share
from tests.deviceplugin.mtgpu import pod_of

SETTINGS = load_settings()
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
CARD = "GPU-n1-1"


def orphaned(name: str, **more: Any) -> dict[str, Any]:
    raw = pod_of(name, CARD)
    return {**raw, "metadata": {**raw["metadata"], "ownerReferences": []}, **more}


def test_cache_follows_the_watch_and_reports_changes() -> None:
    changes: list[int] = []
    pods = NodePods(SETTINGS, lambda: changes.append(1))
    pods.take(share("b"))
    pods.take(share("a"))
    pods.take(pod("none", container("c")))
    assert [gpu_pod.pod.name for gpu_pod in pods.all()] == ["a", "b"]
    assert len(changes) == 3
    pods.take(pod("none", container("c"), annotations={"irrelevant": "x"}))
    assert len(changes) == 3
    pods.take(pod("none", container("c"), phase="Failed"))
    assert pods.presences()["uid-none"] == ("default/none", True)
    pods.drop(pod("none", container("c")))
    assert set(pods.presences()) == {"uid-a", "uid-b"}
    pods.take(share("a", uid="again"))
    pods.drop(share("a"))
    assert pods.by_uid("uid-a") is None
    assert [gpu_pod.pod.uid for gpu_pod in pods.all()] == ["again", "uid-b"]
    assert pods.dropped == 2


def test_static_pod_is_found_by_the_uid_of_the_kubelet() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    mirror = {"kubernetes.io/config.mirror": "5d41402abc4b2a76b9719d911017c592"}
    pods.take(share("static", uid="0b6f7a1e-0000", annotations=mirror))
    found = pods.by_uid("5d41402abc4b2a76b9719d911017c592")
    assert found is not None
    assert found.pod.uid == "0b6f7a1e-0000"
    assert pods.by_uid("5d41402abc4b2a76b9719d911017c593") is None
    assert set(pods.presences()) == {mirror["kubernetes.io/config.mirror"]}
    pods.drop(share("static", uid="0b6f7a1e-0000"))
    assert not pods.presences(), "an interrupted watch drops a pod without its annotations"


def test_pod_with_a_forged_mirror_annotation_does_not_replace_another_pod() -> None:
    pods, victim = NodePods(SETTINGS, lambda: None), "0b6f7a1e-0000"
    pods.take(share("victim", uid=victim))
    pods.take(share("thief", uid="0b6f7a1e-0001", annotations={"kubernetes.io/config.mirror": victim}))
    assert {uid: key for uid, (key, _) in pods.presences().items()} == {
        victim: "default/victim",
        "0b6f7a1e-0001": "default/thief",
    }


def test_amended_annotations_count_until_the_api_server_has_them() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    pods.take(share(annotations=RECORD))

    def recorded() -> object:
        (gpu_pod,) = pods.all()
        return (gpu_pod.shares or ())[0].card

    (gpu_pod,) = pods.all()
    amended = {"vke.volcengine.com/gpu-index-container-c": "0"}
    pods.amend(gpu_pod, amended)
    assert recorded() == 0
    pods.take(share(annotations=RECORD, phase="Running"))
    assert recorded() == 0
    pods.take(share(annotations={**RECORD, **amended}))
    pods.take(share(annotations=RECORD))
    assert recorded() == 1
    pods.drop(share())
    pods.amend(gpu_pod, amended)
    assert not pods.all(), "it was dropped before"


def test_ended_static_pod_is_found_by_the_uid_of_the_kubelet() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    pods.take(share(annotations={**RECORD, "kubernetes.io/config.mirror": "a" * 32}, phase="Failed"))
    gpu_pod = pods.by_uid("a" * 32)
    assert gpu_pod is not None
    assert gpu_pod.pod.ended


def test_limited_pods_are_listed_until_they_end() -> None:
    changes: list[int] = []
    pods = NodePods(load_settings(), lambda: changes.append(1))
    pods.take(pod("plain", container("c")))
    pods.take(pod_of("q", CARD))
    pods.take(pod_of("p", CARD))
    assert [one.name for one in pods.limited_pods()] == ["p", "q"]
    assert not pods.all(), "they request no resource"
    assert len(changes) == 3
    pods.take(pod_of("q", CARD, phase="Running"))
    assert len(changes) == 3
    pods.take(pod_of("q", CARD, "0.3"))
    assert [one.request for one in pods.limited_pods()] == [200, 300]
    pods.take(pod_of("q", CARD, "0.3", phase="Succeeded"))
    assert [one.name for one in pods.limited_pods()] == ["p"]
    pods.drop(pod("p"))
    assert not pods.limited_pods()
    assert len(changes) == 6


def test_limited_pod_without_owner_is_listed_until_it_ends() -> None:
    pods = NodePods(load_settings(), lambda: None)
    pods.take(pod_of("p", CARD))
    pods.take(orphaned("p"))
    assert [one.name for one in pods.limited_pods()] == ["p"]
    pods.take(orphaned("p", status={"phase": "Failed"}))
    assert not pods.limited_pods()
