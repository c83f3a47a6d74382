"""`--usage`: whom the commands ask, what they show, and that an agent that does not answer is not a use of 0."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from deviceplugin.health import HealthServer
from mgpu.cli.agent_metrics import ClusterWithUse, UseReader, ask_agents, ask_scheduler, find_agents, unknown_lines
from mgpu.cli.main import main
from mgpu.cli.scheduler_source import SchedulerSource, Unavailable
from mgpu.cli.sources import FROM_SCHEDULER, Reading
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.presentation.answers import ClusterAnswer, UseAnswer
from mgpu.presentation.card_views import CardView, NodeView
from mgpu.presentation.measured_use import ClusterUse, MeasuredUse, NodeUse, UnknownUse, Used
from mgpu.presentation.overview import Overview
from playground.processes import own_address
from tests.agent_metrics import page
from tests.agent_pods import agent
from tests.builders import GIB, container, pod, state
from tests.mgpu.cli.served import ON_A_TERMINAL, served
from tests.scheduler.explained_cluster import add, add_node

PODS = "/api/v1/namespaces/mgpu-system/pods"
ADDRESS = own_address()
FORBIDDEN = ApiError(403, "Forbidden", "pods is forbidden")
RECORD = {"vke.volcengine.com/gpu-index-container-c": "0", "vke.volcengine.com/assumed": "true"}


class Server(Api):
    """An API server with these Pods of agents, of which each answers with what `answers` has for its name."""

    def __init__(
        self,
        *pods: dict[str, Any],
        answers: Mapping[str, bytes | Exception] = MappingProxyType({}),
        allowed: bool = True,
        error: Exception | None = None,
    ) -> None:
        self._pods = pods
        self._answers = answers
        self._allowed = allowed
        self._error = error
        self.asked: list[str] = []
        self.lists: list[str] = []

    def create(self, path: str, body: Any, **_: object) -> dict[str, Any]:
        assert path.endswith("/selfsubjectaccessreviews")
        assert body["spec"]["resourceAttributes"]["subresource"] == "proxy"
        return {"status": {"allowed": self._allowed}}

    def list(self, path: str, **query: object) -> tuple[list[dict[str, Any]], str]:
        assert path == PODS
        if self._error:
            raise self._error
        self.lists.append(str(query["fieldSelector"]))
        node = str(query["fieldSelector"]).removeprefix("spec.nodeName=")
        return [raw for raw in self._pods if not node or raw["spec"]["nodeName"] == node], "1"

    def fetch_within(self, path: str, **_: Any) -> bytes:
        self.asked.append(path)
        answer = self._answers[path.removeprefix(f"{PODS}/").partition(":")[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Scheduler(SchedulerSource):
    """A scheduler that knows these pages, and answers `answers` requests."""

    def __init__(self, pages: Mapping[str, bytes] = MappingProxyType({}), answers: int = 0) -> None:
        self._pages = pages
        self._answers = answers
        self.asked: list[int] = []

    def use(self, nodes: Sequence[str]) -> UseAnswer:
        if len(self.asked) == self._answers:
            raise Unavailable("too many commands ask")
        self.asked.append(len(nodes))
        pages = {node: self._pages[node].decode() for node in nodes if node in self._pages}
        return UseAnswer(pages, {node: "gone" for node in nodes if node == "gone"})


def use_of(server: Server, nodes: list[str]) -> ClusterUse:
    """Return what `--usage` shows for these nodes."""
    found = UseReader(server, Scheduler(), wanted=True).read(reading(*nodes, origin=""))
    assert found is not None
    assert found.value.use is not None
    return found.value.use


def test_an_agent_is_asked_at_the_port_of_its_ready_pod() -> None:
    pods = [agent("n1", port=9404), agent("n1", name="older", ready=False, port=1), agent("n2", port=9405)]
    server = Server(*pods, answers={"agent-n1": page(cards=[(0, 0.5, GIB)]), "agent-n2": page(("a/p/c", 0, 0.1, GIB))})
    found = use_of(server, ["n1", "n2"])
    assert sorted(server.asked) == [f"{PODS}/agent-n{i}:940{3 + i}/proxy/metrics" for i in (1, 2)]
    assert server.lists == ["spec.nodeName=n1", "spec.nodeName=n2"]
    assert list(found) == ["n1", "n2"]
    first, second = found.values()
    assert isinstance(first, NodeUse)
    assert first.cards[0].used == Used(500, GIB)
    assert isinstance(second, NodeUse)
    assert second.containers[0].pod == "a/p"


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server(), "there is no Pod of an agent"),
        (Server(agent(waiting="CrashLoopBackOff", ready=False, port=1)), "the agent is not ready (CrashLoopBackOff)"),
        (Server(agent()), "Pod agent-n1 has no port for metrics"),
        (Server(agent(port=1), answers={"agent-n1": b""}), "the agent measures no use"),
        (
            Server(agent(port=1), answers={"agent-n1": ApiError(503, "", "dial\n\x1b[2Jtcp")}),
            "the agent does not answer: dial \N{REPLACEMENT CHARACTER}[2Jtcp",
        ),
        (
            Server(agent(port=1), answers={"agent-n1": Unreachable("late")}),
            "the agent has sent no answer of at most 1 MiB within 3 s",
        ),
        (Server(agent(port=1), allowed=False), "you may not get pods/proxy in mgpu-system"),
        (Server(error=FORBIDDEN), "the Pods of the agents cannot be listed: pods is forbidden"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_asked_is_unknown_with_the_reason(server: Server, reason: str) -> None:
    assert use_of(server, ["n1"]) == {"n1": UnknownUse(reason)}


def test_a_refusal_of_one_node_does_not_keep_the_others_from_being_asked() -> None:
    pods = [agent(f"n{i}", port=1) for i in range(20)]
    answers = {f"agent-n{i}": page(("a/p/c", 0, 0.1, GIB)) if i else FORBIDDEN for i in range(20)}
    server = Server(*pods, answers=answers)
    found = use_of(server, [f"n{i}" for i in range(20)])
    assert [isinstance(use, UnknownUse) for use in found.values()] == [True, *[False] * 19]
    assert server.lists == [""]


def test_no_further_agent_is_asked_after_a_minute() -> None:
    seconds = iter([0.0, 59.0, 61.0])
    server = Server(agent("n1", port=1), agent("n2", port=1), answers=dict.fromkeys(["agent-n1", "agent-n2"], b""))
    agents = find_agents(server, ["n1", "n2"])
    assert not isinstance(agents, UnknownUse)
    found = ask_agents(server, agents, ["n1", "n2"], lambda: next(seconds))
    assert len(server.asked) == 1
    assert UnknownUse("the agent was not asked, since the other agents took more than 60 s") in found.values()


def test_nodes_with_one_reason_share_a_line_and_many_are_counted() -> None:
    use: dict[str, MeasuredUse] = {
        "n2": UnknownUse("late"),
        "n1": UnknownUse("late"),
        "n3": UnknownUse("gone"),
        "n4": NodeUse(),
    }
    assert unknown_lines(use) == ["n1, n2: use unknown: late", "n3: use unknown: gone"]
    assert unknown_lines({f"n{i}": UnknownUse("late") for i in range(5000)}) == ["5,000 nodes: use unknown: late"]


def test_watch_shows_the_last_cluster_again_when_only_its_use_has_changed() -> None:
    answers: dict[str, bytes | Exception] = {}
    nodes = (NodeView("n1", (CardView(state()),)), NodeView("bare", ()))
    reader = UseReader(Server(agent(port=1), answers=answers), Scheduler(), wanted=True)
    cluster = Reading(ClusterAnswer(Overview(nodes)), "")

    def used(memory: int, found: Reading[ClusterAnswer] | None) -> Reading[ClusterWithUse] | None:
        answers["agent-n1"] = page(cards=[(0, 0.5, memory)])
        return reader.read(found)

    first, same, other = used(1, cluster), used(1, None), used(2, None)
    assert first is not None
    assert first.value.use is not None
    assert list(first.value.use) == ["n1"]
    assert same is None
    assert other is not None
    assert (other.value.answer, other.origin) == (cluster.value, cluster.origin)
    assert other.value.use != first.value.use


def reading(*nodes: str, origin: str = FROM_SCHEDULER) -> Reading[ClusterAnswer]:
    views = tuple(NodeView(node, (CardView(state()),)) for node in nodes)
    return Reading(ClusterAnswer(Overview(views)), origin)


def test_the_scheduler_is_asked_if_it_has_answered_what_pods_hold() -> None:
    scheduler = Scheduler({"n1": page(cards=[(0, 0.5, GIB)])}, 9)
    found = UseReader(Server(error=FORBIDDEN), scheduler, wanted=True).read(reading("n1", "gone", "other"))
    assert found is not None
    assert found.value.use is not None
    assert isinstance(found.value.use["n1"], NodeUse)
    assert found.value.use["gone"] == UnknownUse("gone")
    assert found.value.use["other"] == UnknownUse("the scheduler has not answered for it")


def test_a_scheduler_is_asked_about_few_nodes_at_a_time_and_may_fail_in_between() -> None:
    names = [f"n{i}" for i in range(200)]
    scheduler = Scheduler(dict.fromkeys(names, b""), 2)
    found = ask_scheduler(scheduler, names)
    assert scheduler.asked == [64, 64]
    assert found is not None
    assert list(found.values())[127:129] == [
        UnknownUse("the agent measures no use"),
        UnknownUse("the scheduler does not answer: too many commands ask"),
    ]
    assert len(found) == 200
    scheduler = Scheduler(dict.fromkeys(names, b""), 9)
    assert ask_scheduler(scheduler, [f"{'n' * 240}{i}" for i in range(30)])
    assert max(scheduler.asked) < 14


def test_the_agents_are_asked_through_the_api_server_if_the_scheduler_does_not_answer() -> None:
    server = Server(agent(port=1), answers={"agent-n1": page(cards=[(0, 0.5, GIB)])})
    found = UseReader(server, Scheduler(), wanted=True).read(reading("n1"))
    assert found is not None
    assert found.value.use is not None
    assert isinstance(found.value.use["n1"], NodeUse)


@pytest.mark.parametrize(
    ("wanted", "nodes", "server", "asked"),
    [
        (False, 1, Server(agent("n0", port=1)), False),
        (None, 100, Server(agent("n0", port=1), answers={"agent-n0": b""}), True),
        (None, 101, Server(agent("n0", port=1)), False),
        (True, 101, Server(agent("n0", port=1), answers={"agent-n0": b""}), True),
        (None, 1, Server(agent("n0", port=1), allowed=False), False),
        (None, 1, Server(), False),
    ],
    ids=["unwanted", "few nodes", "many nodes", "wanted", "forbidden", "no agents"],
)
def test_by_default_few_agents_are_asked_if_the_user_may(
    wanted: bool | None, nodes: int, server: Server, *, asked: bool
) -> None:
    found = UseReader(server, Scheduler(), wanted=wanted).read(reading(*(f"n{i}" for i in range(nodes)), origin=""))
    assert found is not None
    assert (found.value.use is not None) == asked
    assert bool(server.asked) == asked


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of two nodes. The agent of n1 measures, and that of n2 does not answer."""
    if ADDRESS.startswith("127."):
        pytest.skip("this machine has no address but that of loopback")
    text = page(("default/p/c", 0, 0.12, 3 * GIB), cards=[(0, 0.2, 4 * GIB), (1, 0.0, GIB)])
    server = HealthServer(0, lambda: None, lambda: None, metrics=lambda: text, content_type="text/plain")
    server.start()

    def fill(api: Api) -> None:
        crd = Path(__file__).parents[3] / "manifests" / "crds" / "device.yaml"
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(crd.read_text()))
        for name, port in (("n1", server.port), ("n2", 9)):
            add_node(api, name, 2)
            raw = agent(name, ip=ADDRESS, port=port)
            made = api.create(PODS, raw)
            api.replace(f"{PODS}/{raw['metadata']['name']}/status", {**made, "status": raw["status"]})
        add(api, pod("p", container("c", 50, 8 * 1024), node="n1", annotations=RECORD))

    with served(tmp_path_factory.mktemp("api"), fill) as kubeconfig:
        yield kubeconfig
    server.stop()


def run(kubeconfig: str, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
    result = CliRunner(env=env).invoke(main, [*arguments, "--kubeconfig", kubeconfig, "--from", "api"])
    assert result.exit_code == 0, result.output
    return result


def test_inspect_shows_what_is_used_within_what_is_held(kubeconfig: str) -> None:
    usage = json.loads(run(kubeconfig, "inspect", "n1", "--usage", "-o", "json").stdout)["usage"]
    assert usage["n1"] == {
        "unknown": None,
        "problem": None,
        "cards": [
            {
                "index": 0,
                "uuid": "GPU-n1-0",
                "used": {"core": 20, "memory": 4 * GIB},
                "pods": [
                    {
                        "pod": "default/p",
                        "held": {"core": 50, "memory": 8 * GIB},
                        "used": {"core": 12, "memory": 3 * GIB},
                    }
                ],
            },
            {"index": 1, "uuid": "GPU-n1-1", "used": {"core": 0, "memory": GIB}, "pods": []},
        ],
        "containers": [
            {
                "pod": "default/p",
                "container": "c",
                "index": 0,
                "uuid": "GPU-n1-0",
                "used": {"core": 12, "memory": 3 * GIB},
                "memoryLimit": 8 * GIB,
            }
        ],
    }
    assert list(usage) == ["n1"]
    text = run(kubeconfig, "inspect", "--usage", env=ON_A_TERMINAL).stdout
    assert "used   20% 4 GiB" in text
    assert "A default/p · 12/50% 3/8 GiB on 0" in text
    assert "use unknown: the agent does not answer: error trying to reach service" in text
    assert "usage" not in json.loads(run(kubeconfig, "inspect", "-o", "json").stdout)


def test_inspect_in_a_pipe_has_columns_for_what_is_used(kubeconfig: str) -> None:
    lines = run(kubeconfig, "inspect", "--usage").stdout.splitlines()
    rows = [line.split()[8:] for line in lines[:4]]
    assert rows == [
        ["USED-CORE", "USED-MEMORY", "HELD-BY"],
        ["20%", "4096Mi", "default/p"],
        ["0%", "1024Mi", "-"],
        ["-", "-", "-"],
    ]
    assert any(line.startswith("n2: use unknown: the agent does not answer") for line in lines)


def test_top_shows_what_is_used_beside_what_is_held(kubeconfig: str) -> None:
    answer = json.loads(run(kubeconfig, "top", "-o", "json", "--sort", "name").stdout)
    in_use = {"core": 20, "memory": 5 * GIB}
    assert answer["cluster"]["inUse"] == answer["models"][0]["inUse"] == answer["nodes"][0]["inUse"] == in_use
    assert answer["nodes"][1]["inUse"] == {"core": None, "memory": None}
    assert answer["holders"][0]["inUse"] == {"core": 12, "memory": 3 * GIB}
    assert list(answer["useUnknown"]) == ["n2"]
    lines = run(kubeconfig, "top", "--sort", "name", env=ON_A_TERMINAL).stdout.splitlines()
    assert lines[2] == "really used: core 5%, memory 2%"
    assert any("n2: use unknown: the agent does not answer" in line for line in lines)
    first, second = (next(line.split() for line in lines if line.startswith(f"{name} ")) for name in ("n1", "n2"))
    assert (first[4], first[6:]) == ("20/50/200%", ["5/8/160", "GiB"])
    assert (second[4], second[6:]) == ("?/0/200%", ["?/0/160", "GiB"])
    assert ["default/p", "1", "12/50%", "3/8", "GiB"] in [line.split()[:5] for line in lines]
    rows = [line.split() for line in run(kubeconfig, "top", "node", "--sort", "name").stdout.splitlines()]
    assert [row[4:] for row in rows] == [
        ["HELD-CORE", "CORE", "HELD-MEMORY", "MEMORY", "USED-CORE", "USED-MEMORY"],
        ["50%", "200%", "8192Mi", "163840Mi", "20%", "5120Mi"],
        ["0%", "200%", "0Mi", "163840Mi", "-", "-"],
    ]
    plain = json.loads(run(kubeconfig, "top", "--no-usage", "-o", "json").stdout)
    assert "useUnknown" not in plain
    assert "inUse" not in plain["cluster"]
