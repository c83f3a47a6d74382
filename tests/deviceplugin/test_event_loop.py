"""An agent whose event loop hangs says so to the probes, which are answered on threads."""

import time

from deviceplugin.event_loop import HANGING_SECONDS, UNRESPONSIVE_SECONDS
from mgpu.kube import ApiError
from tests.deviceplugin.node import Node
from tests.waiting import until


def test_probes_event_loop_hangs_agent_is_neither_ready_nor_healthy(node: Node) -> None:
    with node.agent() as agent:
        until(lambda: agent._heartbeat.silence() < 0.1)
        now = time.monotonic()
        agent._heartbeat._clock = lambda: now + UNRESPONSIVE_SECONDS + 2
        assert agent.not_ready_reason() == "the event loop has not run for 5 s"
        assert not agent.unhealthy_reason()
        agent._heartbeat._clock = lambda: now + HANGING_SECONDS + 2
        assert agent.unhealthy_reason() == "the event loop has not run for 32 s"


def test_readiness_report_refused_later_agent_stays_ready(node: Node) -> None:
    """The scheduler would take every node away where the API server refuses what all agents report."""
    with node.agent() as agent:

        def refuse(*_: object) -> None:
            raise ApiError(403, "Forbidden", "no right")

        agent._reporter._api.patch = refuse  # type: ignore[assignment, method-assign]
        node.set_cards([{"memory": "80Gi"}, {"memory": "80Gi", "healthy": False}])
        assert until(agent.unreported_reason) == "403 Forbidden: no right"
        assert not agent.not_ready_reason()
