"""`isolation: mps` through the agent, a kubelet and a runtime."""

import shlex
from typing import Any

from tests.builders import share
from tests.deviceplugin.isolation.mps.fake import CARD, COMMAND, OTHER, broken_program, kill, lives, pid_of
from tests.deviceplugin.node import PODS, Node
from tests.waiting import until

EVENTS = "/api/v1/namespaces/default/events"


def settings(node: Node, **more: Any) -> dict[str, Any]:
    own = {"mpsDir": str(node.folder / "mps"), "mpsControl": shlex.join(COMMAND), "mpsRequireMounts": False}
    return {"isolation": "mps", **own, **more}


def decided(name: str, card: str = "0") -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": card}
    return share(name, node="n1", core=30, mib=2048, annotations=record)


def warnings(node: Node, reason: str) -> list[str]:
    return [event["message"] for event in node.api.get(EVENTS)["items"] if event["reason"] == reason]


def test_container_runs_within_its_limits_and_its_daemon_ends_with_it(node: Node) -> None:
    with node.agent(**settings(node)):
        node.create(decided("p"))
        node.create(decided("q", "1"))
        for name in ("p", "q"):
            node.runs(name)
        pipe = str(node.folder / "mps" / CARD / "pipe")
        assert (
            node.env("p").items()
            >= {
                "NVIDIA_VISIBLE_DEVICES": CARD,
                "CUDA_MPS_PIPE_DIRECTORY": pipe,
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
            }.items()
        )
        assert f"{pipe} → {pipe}\n{node.folder}/mps/shm → /dev/shm\n" in node.runtime.logs("default", "p")
        daemon = pid_of(node.folder / "mps")
        node.api.delete(f"{PODS}/p")
        until(lambda: not lives(daemon))
        assert lives(pid_of(node.folder / "mps", OTHER))


def test_daemons_outlive_the_agent_and_the_end_of_one_is_an_event(node: Node) -> None:
    with node.agent(**settings(node)):
        node.create(decided("p"))
        node.runs("p")
        daemon = pid_of(node.folder / "mps")
    assert lives(daemon)
    with node.agent(**settings(node)):
        node.create(decided("q"))
        node.runs("q")
        assert pid_of(node.folder / "mps") == daemon
        assert warnings(node, "MgpuMps") == []
        kill(daemon)
        until(lambda: any(f"daemon of card {CARD} ended" in text for text in warnings(node, "MgpuMps")))
        until(lambda: lives(pid_of(node.folder / "mps")))
        node.create(decided("r"))
        node.runs("r")


def test_daemon_that_does_not_come_up_is_an_event_on_the_node(node: Node) -> None:
    with node.agent(**settings(node, mpsControl=broken_program(node.folder))):
        node.create(decided("p"))
        until(lambda: any("cannot be started: No such file" in text for text in warnings(node, "MgpuMps")))
        assert not node.runtime.containers()


def test_mps_is_off_by_default(node: Node) -> None:
    with node.agent(mpsDir=str(node.folder / "mps"), mpsControl="/no/such/control"):
        node.create(decided("p"))
        node.runs("p")
        assert not [key for key in node.env("p") if key.startswith("CUDA")]
    assert not (node.folder / "mps").exists()


def test_without_cdi_nothing_is_enforced_and_an_event_says_so(node: Node) -> None:
    with node.agent(**settings(node, cdi=False)):
        node.create(decided("p"))
        node.runs("p")
        assert not [key for key in node.env("p") if key.startswith("CUDA")]
        until(lambda: warnings(node, "MgpuIsolation"))
    assert not (node.folder / "mps").exists()
