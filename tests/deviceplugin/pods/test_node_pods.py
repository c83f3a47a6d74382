"""The pods of the node as the watch keeps them."""

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


def test_node_pods_follow_the_watch() -> None:
    changes: list[int] = []
    pods = NodePods(SETTINGS, lambda: changes.append(1))
    pods.take(share("b"))
    pods.take(share("a"))
    pods.take(pod("none", container("c")))
    assert [known.pod.name for known in pods.all()] == ["a", "b"]
    assert len(changes) == 3
    pods.take(pod("none", container("c"), annotations={"of": "no interest"}))
    assert len(changes) == 3
    pods.take(pod("none", container("c"), phase="Failed"))
    assert pods.presences()["uid-none"] == ("default/none", True)
    pods.drop(pod("none", container("c")))
    assert set(pods.presences()) == {"uid-a", "uid-b"}
    pods.take(share("a", uid="again"))
    pods.drop(share("a"))
    assert pods.by_uid("uid-a") is None
    assert [known.pod.uid for known in pods.all()] == ["again", "uid-b"]
    assert pods.dropped == 2


def test_static_pod_is_found_by_the_kubelets_uid() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    mirror = {"kubernetes.io/config.mirror": "5d41402abc4b2a76b9719d911017c592"}
    pods.take(share("static", uid="0b6f7a1e-0000", annotations=mirror))
    found = pods.by_uid("5d41402abc4b2a76b9719d911017c592")
    assert found is not None
    assert found.pod.uid == "0b6f7a1e-0000"
    assert pods.by_uid("5d41402abc4b2a76b9719d911017c593") is None
    assert set(pods.presences()) == {mirror["kubernetes.io/config.mirror"]}
    pods.drop(share("static", uid="0b6f7a1e-0000"))
    assert not pods.presences(), "a pod that vanished while the watch was down is told without its annotations"


def test_pod_that_poses_as_a_mirror_does_not_replace_the_other_pod() -> None:
    pods, victim = NodePods(SETTINGS, lambda: None), "0b6f7a1e-0000"
    pods.take(share("victim", uid=victim))
    pods.take(share("thief", uid="0b6f7a1e-0001", annotations={"kubernetes.io/config.mirror": victim}))
    assert {uid: key for uid, (key, _) in pods.presences().items()} == {
        victim: "default/victim",
        "0b6f7a1e-0001": "default/thief",
    }


def test_amended_record_counts_until_the_api_server_has_it() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    pods.take(share(annotations=RECORD))

    def recorded() -> object:
        (known,) = pods.all()
        return (known.shares or ())[0].card

    (known,) = pods.all()
    amended = {"vke.volcengine.com/gpu-index-container-c": "0"}
    pods.amend(known, amended)
    assert recorded() == 0
    pods.take(share(annotations=RECORD, phase="Running"))
    assert recorded() == 0
    pods.take(share(annotations={**RECORD, **amended}))
    pods.take(share(annotations=RECORD))
    assert recorded() == 1
    pods.drop(share())
    pods.amend(known, amended)
    assert not pods.all(), "it went before it was amended"


def test_static_pod_that_has_ended_is_still_found_by_the_kubelets_uid() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    pods.take(share(annotations={**RECORD, "kubernetes.io/config.mirror": "a" * 32}, phase="Failed"))
    known = pods.by_uid("a" * 32)
    assert known is not None
    assert known.pod.ended


def test_limited_pods_are_listed_until_they_end_and_each_change_is_reported() -> None:
    changes: list[int] = []
    pods = NodePods(load_settings(), lambda: changes.append(1))
    pods.take(pod("plain", container("c")))
    pods.take(pod_of("q", CARD))
    pods.take(pod_of("p", CARD))
    assert [one.name for one in pods.limited_pods()] == ["p", "q"]
    assert not pods.all(), "they ask the kubelet for nothing, so they are nobody's to refuse"
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


def test_orphaned_pod_of_an_mtgpupod_is_limited_until_it_ends() -> None:
    pods = NodePods(load_settings(), lambda: None)
    pods.take(pod_of("p", CARD))
    pods.take(orphaned("p"))
    assert [one.name for one in pods.limited_pods()] == ["p"]
    pods.take(orphaned("p", status={"phase": "Failed"}))
    assert not pods.limited_pods()
