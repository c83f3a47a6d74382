"""Occupy pods: what is made, and what is read of one."""

import json

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.model.gpu_requests import whole_cards
from mgpu.model.pods import Stage, read_pod
from mgpu.settings import load_settings
from scheduler.mtgpupods.occupy_pods import OccupyPod, manifest, read_occupy_pod
from tests.builders import occupy_pod

SETTINGS = load_settings()


def test_it_is_known_as_the_occupy_pod_of_its_node_and_gpuid() -> None:
    raw = manifest("gpu-node-1", "zxcvb", SETTINGS)
    assert raw["metadata"]["name"] == "mtgpupod-occupypod-gpu-node-1-zxcvb"
    assert mtgpu.occupy_target(read_pod(raw)) == ("gpu-node-1", "zxcvb")


def test_it_asks_for_one_whole_card_of_whoever_serves_them() -> None:
    request = dialects.read_request(read_pod(manifest("n1", "a", SETTINGS)), SETTINGS)
    assert request is not None
    assert request.containers == (whole_cards("occupy", 1, Stage.APP, is_nvidia_gpu=True),)


def test_it_is_pinned_by_affinity_so_that_the_scheduler_counts_it() -> None:
    spec = manifest("n1", "a", SETTINGS)["spec"]
    assert "nodeName" not in spec
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
    assert spec["tolerations"] == [{"operator": "Exists"}]


def test_it_may_nothing_and_dies_at_once() -> None:
    spec = manifest("n1", "a", SETTINGS)["spec"]
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["allowPrivilegeEscalation"], security["runAsNonRoot"]) == (False, True)
    assert (spec["automountServiceAccountToken"], spec["terminationGracePeriodSeconds"]) == (False, 0)


def test_image_and_priority_are_settings() -> None:
    spec = manifest("n1", "a", SETTINGS)["spec"]
    assert (spec["containers"][0]["image"], spec["priorityClassName"]) == ("mgpu", "mgpu-occupy")
    settings = load_settings("dialects: {mtgpu: {occupyImage: busybox, occupyPriorityClass: ''}}")
    spec = manifest("n1", "a", settings)["spec"]
    assert spec["containers"][0]["image"] == "busybox"
    assert "priorityClassName" not in spec


def test_it_is_plain_json() -> None:
    raw = manifest("n1", "a", SETTINGS)
    assert json.loads(json.dumps(raw)) == raw


def test_one_that_cannot_be_scheduled_says_why() -> None:
    raw = occupy_pod()
    row = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    raw["status"]["conditions"] = [{"type": "Initialized", "status": "True", "message": "fine"}, row]
    found = read_occupy_pod(raw, read_pod(raw), None)
    assert found == OccupyPod("uid-mtgpupod-occupypod-n1-zxcvb", message="0/1 nodes are available")
    assert (found.alive, found.running, found.ended) == (True, False, False)


def test_one_that_failed_says_why_and_is_not_alive() -> None:
    raw = occupy_pod(phase="Failed")
    raw["status"]["message"] = "no such device"
    found = read_occupy_pod(raw, read_pod(raw), "GPU-n1-0")
    assert (found.message, found.card, found.alive, found.ended) == ("no such device", "GPU-n1-0", False, True)


def test_one_that_runs_and_goes_does_not_run() -> None:
    raw = occupy_pod(phase="Running")
    assert read_occupy_pod(raw, read_pod(raw), None).running
    raw["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    assert not read_occupy_pod(raw, read_pod(raw), None).running


def test_a_pod_of_that_name_without_the_label_is_somebody_elses() -> None:
    raw = occupy_pod(phase="Running")
    raw["metadata"]["labels"] = {}
    found = read_occupy_pod(raw, read_pod(raw), None)
    assert (found.ours, found.alive) == (False, False)
