"""`mgpu simulate` (docs/design/simulate.md), called by its command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mgpu.cli.main import main
from tests.builders import container, node, pod, share
from tests.playground.simulate.simulation import run, served, simulated

EXAMPLES = Path(__file__).parents[3] / "examples" / "simulate"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_examples_give_their_committed_outputs(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    source = example.with_suffix(".yaml")
    marked = [line for line in source.read_text().splitlines() if line.startswith("# options: ")]
    options = marked[0].removeprefix("# options: ").split() if marked else []
    result = run(source.name, *options, "-o", "json")
    assert json.loads(result.stdout) == json.loads(example.read_text())
    assert CliRunner().invoke(main, ["simulate", source.name, *options]).exit_code == 0


def test_output_has_every_key() -> None:
    found = simulated(served(), share("half", uid=""), share("huge", mib=10**6))
    half, huge = found["pods"]
    keys = [
        "namespace",
        "name",
        "admitted",
        "denied",
        "patch",
        "dialect",
        "node",
        "rejections",
        "scores",
        "annotations",
        "containers",
    ]
    assert list(half) == list(huge) == keys
    assert half["containers"]["c"]["cards"] == [0]
    assert half["containers"]["c"]["core"] == [50]
    assert half["containers"]["c"]["memory"] == [1 << 30]
    assert half["containers"]["c"]["env"]["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-0"
    assert (huge["node"], huge["scores"], huge["annotations"], huge["containers"]) == (None, {}, {}, {})
    assert "2 cards: " in huge["rejections"]["n1"]
    assert found["nodes"]["n1"]["cards"][0] == {
        "index": 0,
        "uuid": "GPU-n1-0",
        "healthy": True,
        "core": {"used": 50, "total": 100},
        "memory": {"used": 1 << 30, "total": 80 << 30},
        "holders": ["default/half/c"],
        "slices": [],
        "gpuid": None,
    }
    assert found["nodes"]["n1"]["annotations"] == {}


def test_pod_without_gpu_is_placed_unchanged() -> None:
    found = simulated(node(), pod("plain", {"name": "c", "image": "x"}))["pods"][0]
    assert (found["dialect"], found["patch"], found["node"], found["containers"]) == (None, [], "n1", {})


def test_denied_pod_names_field_and_rule() -> None:
    found = simulated(served(), share("odd", core=120))["pods"][0]
    assert not found["admitted"]
    assert found["node"] is None
    assert found["denied"][0]["field"].startswith("spec.containers[0].resources.requests[")
    assert "multiple of 100" in found["denied"][0]["message"]


def test_mutating_patch_is_shown_and_applied() -> None:
    requests = share("half")
    del requests["spec"]["containers"][0]["resources"]["limits"]
    found = simulated(served(), requests)["pods"][0]
    assert [operation["path"] for operation in found["patch"]] == ["/spec/containers/0/resources/limits"]
    assert found["node"] == "n1"


def test_running_pods_hold_what_their_records_say_and_are_not_listed() -> None:
    keys = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
    found = simulated(served(), share("there", node="n1", annotations=keys), share("late", node="n1"))
    assert found["pods"] == []
    assert [card["holders"] for card in found["nodes"]["n1"]["cards"]] == [[], ["default/late/c", "default/there/c"]]


def test_unreadable_record_is_held_on_every_card_and_reported() -> None:
    keys = {"vke.volcengine.com/gpu-index-container-c": "what"}
    result = run("-", "-o", "json", objects=[served(), share("odd", node="n1", annotations=keys)])
    cards = json.loads(result.stdout)["nodes"]["n1"]["cards"]
    assert [card["core"]["used"] for card in cards] == [50, 50]
    assert "pod default/odd: " in result.stderr


def test_ended_pod_holds_nothing() -> None:
    keys = {"vke.volcengine.com/gpu-index-container-c": "0"}
    found = simulated(served(), share("done", node="n1", annotations=keys, phase="Failed"))
    assert found["nodes"]["n1"]["cards"][0]["holders"] == []


def test_placement_considers_cpu_and_memory() -> None:
    small = served("small")
    small["status"]["allocatable"]["cpu"] = "1"
    wants = share("busy")
    wants["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    found = simulated(small, served("large"), wants)["pods"][0]
    assert found["node"] == "large"
    assert found["rejections"] == {"small": "Insufficient cpu"}


@pytest.mark.parametrize(
    ("kind", "spec", "names"),
    [
        ("Deployment", {"replicas": 2}, ["w-0", "w-1"]),
        ("StatefulSet", {}, ["w-0"]),
        ("Job", {"parallelism": 3, "completions": 2}, ["w-0", "w-1"]),
        ("ReplicaSet", {"replicas": 0}, []),
    ],
)
def test_workload_is_expanded_to_its_pods(kind: str, spec: dict[str, Any], names: list[str]) -> None:
    template = {"spec": share()["spec"]}
    workload = {"kind": kind, "metadata": {"name": "w", "namespace": "team"}, "spec": {**spec, "template": template}}
    found = simulated(served(), workload)["pods"]
    assert [row["name"] for row in found] == names
    assert all(row["namespace"] == "team" and row["node"] == "n1" for row in found)


def test_lists_and_several_documents_are_read() -> None:
    listed = {"kind": "List", "metadata": {}, "items": [share("a"), share("b")]}
    assert [row["name"] for row in simulated(served(), listed)["pods"]] == ["a", "b"]


def test_card_policy_flag_overrides_the_settings() -> None:
    def cards(policy: str) -> list[int]:
        found = simulated(served(), share("a"), share("b"), options=("--card-policy", policy))
        return [row["containers"]["c"]["cards"][0] for row in found["pods"]]

    assert (cards("binpack"), cards("spread")) == ([0, 0], [0, 1])


def test_pod_with_slices_waits_without_a_partitioned_node() -> None:
    requests = pod("other", {"name": "c", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "2"}}})
    found = simulated(served(), requests)["pods"][0]
    assert (found["dialect"], found["node"]) == ("slices", None)
    assert found["rejections"] == {"n1": "node label gpu.partitioning is not set, not mig"}


def test_malformed_amount_denies_only_its_pod() -> None:
    """The other pods of the file are placed."""
    huge = {"name": "c", "image": "x", "resources": {"limits": {"aliyun.com/gpu-mem": "9223372036854775808"}}}
    odd = {"name": "c", "image": "x", "resources": {"requests": {"cpu": "banana"}}}
    found = simulated(served(), pod("huge", huge), pod("odd", odd), share("good"))["pods"]
    assert [row["admitted"] for row in found] == [False, False, True]
    assert found[0]["denied"][0]["field"] == "spec.containers[0].resources.requests[aliyun.com/gpu-mem]"
    assert "banana" in found[1]["denied"][0]["message"]


def test_every_node_with_cards_serves_all_but_mgpu_without_labels() -> None:
    bare = served()
    bare["metadata"]["labels"] = {}
    requests = {"gpushare": {"aliyun.com/gpu-mem": "1"}, "memory": {"koordinator.sh/gpu-memory": "1Gi"}}
    requests |= {"ratio": {"koordinator.sh/gpu-memory-ratio": "10"}, "whole": {"nvidia.com/gpu": "1"}}
    pods = [pod(name, {"name": "c", "image": "x", "resources": {"limits": a}}) for name, a in requests.items()]
    found = simulated(bare, *pods, share("mgpu"))["pods"]
    assert [row["node"] for row in found] == ["n1"] * 4 + [None]
    assert "vke.node.gpu.schedule" in found[-1]["rejections"]["n1"]


def device(*more: dict[str, Any], **annotations: str) -> dict[str, Any]:
    cards = [
        {"type": "gpu", "id": f"GPU-{i}", "minor": i, "resources": {"koordinator.sh/gpu-memory": "8Gi"}} for i in (0, 1)
    ]
    return {**DEVICE, "metadata": {"name": "n1", "annotations": annotations}, "spec": {"devices": [*cards, *more]}}


def test_other_devices_stand_among_the_cards_with_their_type() -> None:
    rdma = {"type": "rdma", "id": "mlx5_0", "minor": 0, "resources": {"koordinator.sh/rdma": "100"}}
    requests = {"koordinator.sh/rdma": "25", "koordinator.sh/gpu-memory-ratio": "50"}
    found = simulated(node(), device(rdma), pod("p", {"name": "c", "image": "x", "resources": {"limits": requests}}))
    cards = found["nodes"]["n1"]["cards"]
    assert [(card.get("type"), card["index"], card["holders"]) for card in cards] == [
        (None, 0, ["default/p/c"]),
        (None, 1, []),
        ("rdma", 0, ["default/p/c"]),
    ]
    assert cards[2]["core"] == {"used": 25, "total": 100}
    assert found["pods"][0]["containers"]["c"]["cards"] == [0]
    assert found["pods"][0]["containers"]["c"]["others"] == {"rdma": [0]}


def test_cards_given_by_the_kubelet_are_not_shared() -> None:
    given = [{"podUID": "old", "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ["GPU-0"]}]
    there = device(**{"node.koordinator.sh/devices-checkpoints": json.dumps(given)})
    old = pod("old", {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}, uid="old", node="n1")
    requests = [pod(f"p{i}", {"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "5"}}}) for i in (0, 1)]
    for running in ([old], []):
        found = simulated(node(), there, *running, *requests)
        holders = [card["holders"] for card in found["nodes"]["n1"]["cards"]]
        assert holders == [["default/old/c" if running else "pod old/c"], ["default/p0/c"]]
        assert found["pods"][1]["node"] is None


def test_cards_on_the_unhealthy_list_are_not_used() -> None:
    listed = {"kind": "ConfigMap", "metadata": {"name": "unhealthy-gpu-n1", "namespace": "kube-system"}}
    found = simulated(served(), {**listed, "data": {"gpus": "0"}}, share("p"))
    assert [card["healthy"] for card in found["nodes"]["n1"]["cards"]] == [False, True]
    assert found["pods"][0]["containers"]["c"]["cards"] == [1]
    result = run("-", objects=[served(), {**listed, "data": {"gpus": "x"}}, share("p")])
    assert result.stderr.startswith("<stdin>: document 2: ConfigMap unhealthy-gpu-n1 marks no card: data.gpus")


def test_nvidia_plugin_node_gets_whole_card_pods_without_record() -> None:
    theirs = served("n1")
    theirs["metadata"]["labels"]["mgpu.io/whole-cards"] = "nvidia"
    whole = pod("whole", {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}})
    found = simulated(theirs, whole, share("p"), {**whole, "metadata": {"name": "late"}})
    first, second, third = found["pods"]
    assert (first["node"], first["annotations"]) == ("n1", {})
    assert second["containers"]["c"]["cards"] == [1]
    assert "could allocate card 1" in third["rejections"]["n1"]


def test_fail_on_pending_exits_with_1_for_a_waiting_pod() -> None:
    assert run("-", "--fail-on-pending", objects=[served(), share()]).exit_code == 0
    assert run("-", "--fail-on-pending", objects=[node(), share()]).exit_code == 1


DEVICE = {"kind": "Device", "metadata": {"name": "n1"}, "spec": {"devices": []}}


@pytest.mark.parametrize(
    ("objects", "line"),
    [
        ([share("p"), share("p")], "<stdin>: document 2: metadata.name: a pod named default/p exists already"),
        ([DEVICE], "<stdin>: document 1: metadata.name: a Device needs a Node"),
        (
            [served(), DEVICE],
            "<stdin>: document 2: metadata.name: the cards of n1 are defined in the Node's annotation",
        ),
        ([share("p", node="gone")], "<stdin>: document 1: spec.nodeName: no node is named 'gone'"),
        (
            [served(cards="{")],
            "<stdin>: document 1: metadata.annotations[mgpu.io/cards]: is not JSON",
        ),
        ([node(), node()], "<stdin>: document 2: metadata.name: a node named n1 exists already"),
        ([{"kind": "Pod"}], "<stdin>: document 1: metadata: is missing"),
        (["text"], "<stdin>: document 1: must be a Kubernetes object, not str"),
        ([pod("p", container("c", core="x", env=3))], "<stdin>: document 1: spec.containers[0].env: must be a list"),
        ([pod("p")], "<stdin>: document 1: spec.containers: a pod needs at least one container"),
        ([{"kind": "Job", "metadata": {"name": "j"}, "spec": 1}], "<stdin>: document 1: spec.template: is missing"),
        ([{"kind": "List", "metadata": {}, "items": [1]}], "<stdin>: document 1: items[0]: must be a Kubernetes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(objects: list[Any], line: str) -> None:
    result = run("-", objects=objects)
    assert result.exit_code == 2
    assert result.stderr.startswith(line), result.stderr
    assert result.stderr.count("\n") == 1


def test_broken_yaml_names_its_document() -> None:
    result = run("-", text="kind: ConfigMap\nmetadata: {name: a}\n---\na: : b\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("<stdin>: document 2: is not YAML or JSON: ")


def test_missing_file_exits_with_2() -> None:
    result = run("nowhere.yaml")
    assert (result.exit_code, result.stderr) == (2, "nowhere.yaml: cannot be read: No such file or directory\n")


def test_other_kinds_are_skipped_with_a_line_each() -> None:
    service = {"kind": "Service", "metadata": {"name": "s"}}
    config = {"kind": "ConfigMap", "metadata": {"name": "c"}}
    result = run("-", objects=[service, config])
    assert result.exit_code == 0
    assert result.stderr == "<stdin>: document 1: Service s is ignored: it has no effect on a simulation\n"


@pytest.mark.parametrize("policy", ["fragmentation", "fgd"])
def test_learning_policies_choose_one_node_and_keep_cards_whole(policy: str) -> None:
    """They learn from the pods in file order: after two that ask for a whole card, shares are packed together."""
    nodes = [served(name) for name in ("n1", "n2")]
    whole = [pod(f"whole-{i}", container(core=100)) for i in range(2)]
    shares = [share(f"share-{i}", core=30) for i in range(5)]
    options = ("--node-policy", policy, "--card-policy", policy)
    found = simulated(*nodes, *whole, *shares, options=options)
    for row in found["pods"]:
        scores = row["scores"]
        assert list(scores.values()).count(10) == 1
        assert scores[row["node"]] == 10
    cards = [(row["node"], *row["containers"]["c"]["cards"]) for row in found["pods"]]
    assert len(set(cards[:2])) == 2
    assert len(set(cards[2:])) == 2
    assert found == simulated(*nodes, *whole, *shares, options=options)


@pytest.mark.parametrize("policy", ["fragmentation", "fgd"])
def test_learning_policies_learn_from_running_pods(policy: str) -> None:
    """After pods that asked for whole cards, a share joins another share and leaves the first card whole."""
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
    before = [pod(f"old-{i}", container(core=100), node="n1", phase="Succeeded") for i in range(8)]
    there = share("there", annotations=record, node="n1")
    options = ("--card-policy", policy)
    found = simulated(served(), *before, there, share("new"), options=options)
    assert found["pods"][0]["containers"]["c"]["cards"] == [1]
