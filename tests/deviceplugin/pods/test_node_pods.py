"""The node's pods as the agent reads them."""

import pickle
from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from deviceplugin.pods.node_pods import NodePods
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
    assert "'x' is neither a card index nor a UUID" in str(garbage.problem)
    assert "must be at least 256" in str(read(pod("p", container("c", 50))).problem)


def test_asking_is_in_the_kubelets_order() -> None:
    known = read(pod("p", container("a", 10, 512), container("b"), init=(container("i", 30, 512),)))
    assert [(c.name, amount) for c, amount in known.asking(CORE)] == [("i", 30), ("a", 10)]


def test_a_pod_holds_what_it_needs_at_its_busiest() -> None:
    sidecar = container("s", 10, 500, restartPolicy="Always")
    known = read(pod("p", container("a", 10, 300), container("b", 10, 400), init=(sidecar, container("i", 10, 900))))
    assert known.held[MEMORY] == 1400


def test_what_has_run_and_what_has_ended_well() -> None:
    raw = pod("p", container("c", 10, 512), container("plain"), init=(container("i", 10, 512), container("j", 10, 512)))
    ended = [{"name": n, "state": {"terminated": {"exitCode": code}}} for n, code in (("i", 0), ("j", 1))]
    waiting = [
        {"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}},
        {"name": "plain", "containerID": "x"},
    ]
    known = read({**raw, "status": {"initContainerStatuses": ended, "containerStatuses": waiting}})
    assert known.ran == {"i", "j"}
    assert known.done == {"i"}
    assert read(raw).ran == set()


def test_the_store_follows_the_watch() -> None:
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
    assert pods.present()["uid-none"] == ("default/none", True)
    pods.drop(pod("none", container("c")))
    assert set(pods.present()) == {"uid-a", "uid-b"}
    pods.take(share("a", uid="again"))
    pods.drop(share("a"))
    assert pods.by_uid("uid-a") is None
    assert [known.pod.uid for known in pods.all()] == ["again", "uid-b"]
    assert pods.dropped == 2


def test_a_static_pod_is_known_by_the_uid_that_the_kubelet_gave_it() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    mirror = {"kubernetes.io/config.mirror": "5d41402abc4b2a76b9719d911017c592"}
    pods.take(share("static", uid="0b6f7a1e-0000", annotations=mirror))
    found = pods.by_uid("5d41402abc4b2a76b9719d911017c592")
    assert found is not None
    assert found.pod.uid == "0b6f7a1e-0000"
    assert pods.by_uid("5d41402abc4b2a76b9719d911017c593") is None
    assert set(pods.present()) == {mirror["kubernetes.io/config.mirror"]}
    pods.drop(share("static", uid="0b6f7a1e-0000"))
    assert not pods.present(), "a pod that vanished while the watch was down is told without its annotations"


def test_a_pod_that_poses_as_the_mirror_of_another_pod_takes_no_place_of_that_one() -> None:
    pods, victim = NodePods(SETTINGS, lambda: None), "0b6f7a1e-0000"
    pods.take(share("victim", uid=victim))
    pods.take(share("thief", uid="0b6f7a1e-0001", annotations={"kubernetes.io/config.mirror": victim}))
    assert {uid: key for uid, (key, _) in pods.present().items()} == {
        victim: "default/victim",
        "0b6f7a1e-0001": "default/thief",
    }


def test_what_was_amended_stands_until_the_api_server_says_so_too() -> None:
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


@pytest.mark.parametrize("ran", [True, False])
def test_pod_that_has_ended_is_kept_in_a_few_hundred_bytes(*, ran: bool) -> None:
    """Quotas do not count such pods, and a cluster keeps 12,500 of them: each had cost an agent 57 to 141 KiB."""
    names = [f"c{i}-{'x' * 30}" for i in range(200)]
    record = {"vke.volcengine.com/assumed": "true"} | {
        f"vke.volcengine.com/gpu-index-container-{n}": "1" for n in names
    }
    raw = pod("p", *(container(name, 1, 256) for name in names), annotations=record, node="n1", phase="Failed")
    raw["status"]["containerStatuses"] = [{"name": name, "containerID": "x"} for name in names if ran]
    running = {**raw, "status": {"phase": "Running"}}
    assert len(pickle.dumps(read(running))) > 20_000
    known = read(raw)
    assert len(pickle.dumps(known)) < 1_000
    assert (known.pod.key, known.pod.uid, known.pod.ended) == ("default/p", "uid-p", True)


def test_static_pod_that_has_ended_is_still_found_by_the_kubelets_uid() -> None:
    pods = NodePods(SETTINGS, lambda: None)
    pods.take(share(annotations={**RECORD, "kubernetes.io/config.mirror": "a" * 32}, phase="Failed"))
    known = pods.by_uid("a" * 32)
    assert known is not None
    assert known.pod.ended
