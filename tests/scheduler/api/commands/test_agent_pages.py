"""The scheduler passes on what agents have measured, and what it does not know, with the reason."""

from mgpu.model.agent_pods import AgentPod
from mgpu.presentation.answers import UseAnswer, decode_use, encode_use
from mgpu.presentation.measured_use import LARGEST_PAGE, UnknownUse, read_use
from scheduler.api.commands.agent_pages import AgentPages
from tests.agent_metrics import page
from tests.agent_pods import agent
from tests.scheduler.cluster.objects import put
from tests.scheduler.fake import Replica, cluster

PAGES: dict[str, bytes | UnknownUse] = {
    "n1": page(("a/p/c", 0, 0.1, 5), cards=[(0, 0.5, 7)]) + b"# HELP other x\nother 1\n",
    "n2": b"x" * (LARGEST_PAGE + 1),
    "n3": UnknownUse("late"),
}


def fetch(pod: AgentPod) -> bytes | UnknownUse:
    return PAGES[pod.node]


def test_only_the_lines_about_use_are_passed_on() -> None:
    replica = Replica(cluster(*((name, 1) for name in ("n1", "n2", "n3", "n4"))))
    put(replica, *(agent(name, ip="192.0.2.7", port=9404) for name in PAGES))
    answer = AgentPages(replica.state, fetch).answer(["n1", "n2", "n3", "n4", "nobody"])
    assert list(answer.pages) == ["n1"]
    assert "other" not in answer.pages["n1"]
    assert "capacity" not in answer.pages["n1"]
    first = PAGES["n1"]
    assert isinstance(first, bytes)
    assert read_use(answer.pages["n1"].encode()) == read_use(first)
    assert answer.unknown == {
        "n2": "the metrics of the agent have more than 1 MiB",
        "n3": "late",
        "n4": "there is no Pod of an agent",
        "nobody": "there is no Pod of an agent",
    }
    assert decode_use(encode_use(answer)) == answer
    assert AgentPages(replica.state, fetch).answer([]) == UseAnswer({}, {})
