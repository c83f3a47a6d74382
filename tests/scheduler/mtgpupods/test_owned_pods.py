"""The Pod that is made for an MtgpuPod, and by what it is known again."""

from typing import Any

from mgpu.dialects.mtgpu import read_mtgpupod
from mgpu.dialects.mtgpu_pods import manifest
from scheduler.mtgpupods.observation import is_pod_of
from scheduler.mtgpupods.observed_node import OwnedPod, read_owned_pod
from tests.builders import GIB, card, container, mtgpupod


def of(raw: dict[str, Any]) -> dict[str, Any]:
    return manifest(raw, read_mtgpupod(raw), card(1).uuid, card(1).index)


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row.get("value") for row in container["env"]}


def test_it_has_the_name_the_spec_and_the_owner() -> None:
    raw = mtgpupod("a", namespace="team")
    raw["spec"] |= {"restartPolicy": "Never", "serviceAccountName": "x"}
    made = of(raw)
    assert (made["apiVersion"], made["kind"]) == ("v1", "Pod")
    assert (made["metadata"]["namespace"], made["metadata"]["name"]) == ("team", "a")
    assert {key: made["spec"][key] for key in ("nodeName", "restartPolicy", "serviceAccountName")} == {
        "nodeName": "n1",
        "restartPolicy": "Never",
        "serviceAccountName": "x",
    }
    assert made["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "lsalab.nthu/v1",
            "kind": "MtgpuPod",
            "name": "a",
            "uid": "uid-a",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def test_every_container_sees_its_card_init_containers_too() -> None:
    raw = mtgpupod("a", request="0.25", memory=GIB, init=(container("i"),))
    raw["spec"]["containers"].append(container("d", env=[{"name": "MINE", "value": "1"}]))
    spec = of(raw)["spec"]
    seen = {
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1",
        "MGPU_CARDS": "1",
        "MGPU_CORE_PERCENT": "25",
        "MGPU_MEMORY_BYTES": str(GIB),
    }
    assert [env(c) for c in (*spec["initContainers"], *spec["containers"])] == [seen, seen, {**seen, "MINE": "1"}]


def test_what_it_sets_of_mgpus_own_is_mgpus() -> None:
    raw = mtgpupod("a")
    raw["spec"]["containers"][0]["env"] = [{"name": "MGPU_CARDS", "value": "all"}]
    rows = of(raw)["spec"]["containers"][0]["env"]
    assert [row["value"] for row in rows if row["name"] == "MGPU_CARDS"] == ["1"]


def test_labels_and_annotations_are_copied_and_what_kubectl_applied_is_not() -> None:
    raw = mtgpupod("a", annotations={"kubectl.kubernetes.io/last-applied-configuration": "{}", "x": "y"})
    raw["metadata"] |= {"labels": {"app": "z"}, "finalizers": ["mgpu.io/mtgpupod"], "resourceVersion": "5"}
    meta = of(raw)["metadata"]
    assert meta["labels"] == {"app": "z"}
    assert meta["annotations"]["x"] == "y"
    assert meta["annotations"]["lsalab.nthu/GPUID"] == "zxcvb"
    assert set(meta) == {"namespace", "name", "labels", "annotations", "ownerReferences"}
    assert "kubectl.kubernetes.io/last-applied-configuration" not in meta["annotations"]


def test_the_mtgpupod_itself_is_not_changed() -> None:
    raw = mtgpupod("a")
    of(raw)
    assert raw == mtgpupod("a")


def test_its_own_pod_is_known_by_its_owner_or_after_that_was_taken_off_by_its_uid() -> None:
    raw = mtgpupod("a")
    made = of(raw)
    made["metadata"]["uid"] = "uid-pod"
    assert is_pod_of(made, raw)
    del made["metadata"]["ownerReferences"]
    assert not is_pod_of(made, raw)
    raw["status"]["PodObjectMeta"] = {"uid": "uid-pod"}
    assert is_pod_of(made, raw)


def test_a_pod_of_its_predecessor_or_of_a_mere_co_owner_is_foreign() -> None:
    raw = mtgpupod("a")
    made = of(raw)
    again = mtgpupod("a", uid="uid-again")
    assert not is_pod_of(made, again)
    made["metadata"]["ownerReferences"][0]["controller"] = False
    assert not is_pod_of(made, raw)


def test_what_is_read_of_it_is_what_was_made() -> None:
    made = of(mtgpupod("a"))
    made["metadata"]["uid"] = "uid-pod"
    assert read_owned_pod(made) == OwnedPod("uid-pod", "Pending", deleting=False, card="GPU-n1-1")
    made["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    made["status"] = {"phase": "Failed"}
    assert read_owned_pod(made) == OwnedPod("uid-pod", "Failed", deleting=True, card="GPU-n1-1")
    assert read_owned_pod(made).ended
