"""`kubectl inspect gpushare`, against an API server and as tables."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mgpu.cli.inspect_gpushare import main, node_rows
from mgpu.dialects import gpushare
from mgpu.kube import Api
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.presentation.gpushare_tables import CardRow, NodeRow, PodRow, align_columns, details, summary
from mgpu.settings import load_settings
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from tests.builders import GIB, container, mtgpupod, node, occupy_pod, pod
from tests.scheduler.gpushare import allocated, asking

CRD = Path(__file__).parents[3] / "manifests" / "crds" / "device.yaml"
DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
PODS = "/api/v1/namespaces/default/pods"
FIRST, SECOND = "10.0.20.250", "10.0.33.21"
MIB = 1 << 20

# Character by character as `kubectl inspect gpushare -d` prints it in the seed.
SEED = (
    "\n"
    "NAME:       10.0.20.250\n"
    "IPADDRESS:  10.0.20.250\n"
    "\n"
    "NAME                        NAMESPACE  GPU0(Allocated)  GPU1(Allocated)  GPU2(Allocated)  GPU3(Allocated)  \n"
    "binpack-1-767bddd4b5-gzqk7  default    1                0                0                0                \n"
    "Allocated :                 1 (1%)     \n"
    "Total :                     88         \n"
    "------------------------------------------------------\n"
    "\n"
    "NAME:       10.0.33.21\n"
    "IPADDRESS:  10.0.33.21\n"
    "\n"
    "NAME         NAMESPACE  GPU0(Allocated)  GPU1(Allocated)  GPU2(Allocated)  GPU3(Allocated)  GPU4(Allocated)  "
    "GPU5(Allocated)  GPU6(Allocated)  \n"
    "Allocated :  0 (0%)     \n"
    "Total :      77         \n"
    "------------------------------------------------------\n"
    "\n"
    "\n"
    "Allocated/Total GPU Memory In Cluster:  1/165 (0%)  \n"
)


def seed_node(api: Api, name: str, cards: int, mib: int) -> None:
    raw = node(name)
    raw["status"]["addresses"] = [{"type": "Hostname", "address": "h"}, {"type": "InternalIP", "address": name}]
    api.create("/api/v1/nodes", raw)
    made = tuple(Card(i, f"GPU-{name}-{i}", "Tesla P40", mib * MIB, minor=i) for i in range(cards))
    api.create(DEVICES, write_device(Node(name), "", made))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Api]]:
    """Return the cluster of the specification: four cards of 22,919 MiB, seven of 12,196 MiB, and one pod."""
    folder = tmp_path_factory.mktemp("api")
    tls = self_signed(folder)
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))}), tls=tls) as url:
        write_kubeconfig(folder / "kubeconfig", url, Path(tls[0]).read_bytes(), "admin")
        api = Api.connect(str(folder / "kubeconfig"))
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(CRD.read_text()))
        seed_node(api, SECOND, 7, 12196)
        seed_node(api, FIRST, 4, 22919)
        api.create("/api/v1/nodes", node("no-cards"))
        api.create(PODS, allocated("binpack-1-767bddd4b5-gzqk7", 1, FIRST, 0))
        yield str(folder / "kubeconfig"), api
        api.close()


Inspect = Callable[..., Result]


@pytest.fixture
def inspect_gpushare(cluster: tuple[str, Api]) -> Inspect:
    return lambda *arguments: CliRunner().invoke(main, ["--kubeconfig", cluster[0], *arguments])


@pytest.fixture
def create(cluster: tuple[str, Api]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Return a pod for one test."""
    made: list[str] = []

    def one(raw: dict[str, Any]) -> None:
        made.append(cluster[1].create(PODS, raw)["metadata"]["name"])

    yield one
    for name in made:
        cluster[1].delete(f"{PODS}/{name}", gracePeriodSeconds=0)


def test_details_equal_those_of_gpushares_plugin(inspect_gpushare: Inspect) -> None:
    result = inspect_gpushare("-d")
    assert result.exit_code == 0, result.output
    assert result.stdout == SEED


def test_summary_equals_that_of_gpushares_plugin(inspect_gpushare: Inspect) -> None:
    heads = "  ".join(f"GPU{i}(Allocated/Total)" for i in range(7))
    lines = inspect_gpushare().stdout.splitlines()
    assert lines[0] == f"NAME         IPADDRESS    {heads}  GPU Memory(GiB)"
    assert [line.split() for line in lines[1:3]] == [
        [FIRST, FIRST, "1/22", "0/22", "0/22", "0/22", "0/0", "0/0", "0/0", "1/88"],
        [SECOND, SECOND, *["0/11"] * 7, "0/77"],
    ]
    assert set(lines[3]) == {"-"}
    assert lines[4:] == ["Allocated/Total GPU Memory In Cluster:", "1/165 (0%)  "]


def test_details_of_one_node_list_only_this_node(inspect_gpushare: Inspect) -> None:
    assert inspect_gpushare("-d", SECOND).stdout.startswith(f"\nNAME:       {SECOND}\n")
    assert FIRST not in inspect_gpushare(SECOND).stdout


def test_unknown_node_is_an_error(inspect_gpushare: Inspect) -> None:
    result = inspect_gpushare("n9")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no node is named n9" in result.stderr


def test_node_without_cards_is_no_error(inspect_gpushare: Inspect) -> None:
    result = inspect_gpushare("no-cards")
    assert result.exit_code == 0
    assert result.stdout.endswith("0/0 (0%)  \n")


def test_invalid_input_is_one_line_and_exit_code_2(inspect_gpushare: Inspect, tmp_path: Path) -> None:
    (tmp_path / "mgpu.yaml").write_text("dialects: {gpushare: {memoryUnit: TiB}}")
    result = inspect_gpushare("--config", str(tmp_path / "mgpu.yaml"))
    assert result.exit_code == 2
    assert "dialects.gpushare.memoryUnit" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    server = {"name": "k", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "k", "context": {"cluster": "k", "user": "k"}}
    raw = {"clusters": [server], "contexts": [context], "current-context": "k", "users": [{"name": "k", "user": {}}]}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **raw}))
    assert CliRunner().invoke(main, ["--kubeconfig", str(tmp_path / "kubeconfig")]).exit_code == 1


def test_pod_with_unknown_cards_is_pending(inspect_gpushare: Inspect, create: Callable[[dict[str, Any]], None]) -> None:
    create(asking("late", 3, node=FIRST))
    create(asking("broken", 4, node=FIRST, annotations={gpushare.INDEX: "nonsense"}))
    lines = inspect_gpushare().stdout.splitlines()
    assert lines[0].endswith("PENDING(Allocated)  GPU Memory(GiB)")
    assert lines[1].split()[-2:] == ["7", "8/88"]
    assert lines[2].split()[-2:] == ["0", "0/77"]
    rows = [line.split() for line in inspect_gpushare("-d", FIRST).stdout.splitlines()]
    assert ["NAME", "NAMESPACE", *(f"GPU{i}(Allocated)" for i in range(4)), "Pending(Allocated)"] in rows
    assert ["broken", "default", "0", "0", "0", "0", "4"] in rows
    assert ["Allocated", ":", "8", "(9%)"] in rows


def test_pod_with_a_record_of_a_missing_card_is_pending(
    inspect_gpushare: Inspect, create: Callable[[dict[str, Any]], None]
) -> None:
    raw = asking("half", 3, node=FIRST, annotations={gpushare.ALLOCATION: '{"c":{"1":3},"d":{"9":4}}'})
    raw["spec"]["containers"] += asking("other", 4)["spec"]["containers"]
    raw["spec"]["containers"][1]["name"] = "d"
    create(raw)
    rows = [line.split() for line in inspect_gpushare("-d", FIRST).stdout.splitlines()]
    assert ["half", "default", "0", "3", "0", "0", "4"] in rows


def test_pod_of_another_vocabulary_counts_in_whole_units(
    inspect_gpushare: Inspect, create: Callable[[dict[str, Any]], None]
) -> None:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
    create(pod("shares", container("c", 50, 1500), node=FIRST, annotations=record))
    create(pod("whole", container("c", 100), node=FIRST, annotations={**record, INDEX_OF_MGPU: "2"}))
    rows = [line.split() for line in inspect_gpushare("-d", FIRST).stdout.splitlines()]
    assert ["shares", "default", "0", "2", "0", "0"] in rows
    assert ["whole", "default", "0", "0", "22", "0"] in rows


def test_small_shares_add_up_to_at_most_their_card(
    inspect_gpushare: Inspect, create: Callable[[dict[str, Any]], None]
) -> None:
    """Rounding up each share would exceed the card. The extender's `/inspect` returns the same sum."""
    for i in range(5):
        record = {"vke.volcengine.com/assumed": "true", INDEX_OF_MGPU: "3"}
        create(pod(f"small-{i}", container("c", 10, 256), node=FIRST, annotations=record))
    assert inspect_gpushare(FIRST).stdout.splitlines()[1].split()[2:6] == ["1/22", "0/22", "0/22", "2/22"]


INDEX_OF_MGPU = "vke.volcengine.com/gpu-index-container-c"


def test_unit_is_that_of_the_nodes_or_the_option(inspect_gpushare: Inspect, cluster: tuple[str, Api]) -> None:
    assert json.loads(inspect_gpushare("-o", "json").stdout)["unit"] == "GiB"
    mib = json.loads(inspect_gpushare("-o", "json", "--memory-unit", "mib", FIRST).stdout)
    assert (mib["unit"], mib["nodes"][0]["totalGPU"]) == ("MiB", 4 * 22919)
    counting = node("mib")
    counting["status"]["capacity"] |= {gpushare.MEMORY: "32552", gpushare.COUNT: "2"}
    cluster[1].create("/api/v1/nodes", counting)
    try:
        assert inspect_gpushare("mib").stdout.splitlines()[1].split() == [
            "mib",
            "unknown",
            "0/16276",
            "0/16276",
            "0/32552",
        ]
    finally:
        cluster[1].delete("/api/v1/nodes/mib")


def test_json_equals_that_of_gpushares_extender(inspect_gpushare: Inspect) -> None:
    (first, second) = json.loads(inspect_gpushare("-o", "json").stdout)["nodes"]
    assert (first["name"], first["ipAddress"], first["totalGPU"], first["usedGPU"]) == (FIRST, FIRST, 88, 1)
    held = {"name": "binpack-1-767bddd4b5-gzqk7", "namespace": "default", "usedGPU": 1}
    assert first["devs"][0] == {"id": 0, "totalGPU": 22, "usedGPU": 1, "pods": [held]}
    assert [device["usedGPU"] for device in second["devs"]] == [0] * 7


def test_pod_on_two_cards_is_one_row() -> None:
    rows = (PodRow("default", "p", {0: 2, 1: 3}),)
    made = NodeRow("n1", "10.0.0.1", (CardRow(0, 8, 2), CardRow(1, 8, 3)), rows)
    assert "p            default    2                3                \n" in details([made])
    assert (
        summary([made], "GiB").splitlines()[1] == "n1    10.0.0.1   2/8                    3/8                    5/16"
    )


def test_empty_cluster_prints_empty_tables() -> None:
    assert details([]).endswith("Cluster:  0/0 (0%)  \n")
    assert summary([], "MiB").startswith("NAME  IPADDRESS  GPU Memory(MiB)\n")


def test_column_ends_at_a_line_without_a_cell() -> None:
    assert align_columns(["a\tb\t", "longer\tc\t", "-", "x\ty"]) == "a       b  \nlonger  c  \n-\nx  y\n"


def test_holdings_of_mtgpupods_are_allocated() -> None:
    cards = (Card(0, "GPU-0", "T4", 16384 * MIB, minor=0), Card(1, "GPU-1", "T4", 16384 * MIB, minor=1))
    device = write_device(Node("n1"), "", cards)
    named = mtgpupod(bound="GPU-1", memory=3 * GIB)
    (row,) = node_rows([node()], [device], [occupy_pod(card=1)], load_settings(), [named])
    assert row.cards == (CardRow(0, 16, 0), CardRow(1, 16, 3))
    assert row.pods == (PodRow("default", "m", {1: 3}, 0),)
