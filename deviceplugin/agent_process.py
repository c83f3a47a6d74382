"""Runs the agents of one process, one after the other.

`mgpu deviceplugin` (`deviceplugin.main`) runs an `AgentProcess`. An agent runs only once, so after a handover the
process creates a new one. The process does not end after a handover, because a rolling update may be reverted halfway.
In that case this process serves the node again.
"""

from collections.abc import Callable

from deviceplugin.agent import Agent
from deviceplugin.handover.node_ownership import Outcome


class AgentProcess:
    """A sequence of agents. Call `run` once; `stop` may be called from any thread.

    Attributes:
        agent: The present agent. Any thread may read this attribute.
    """

    def __init__(self, make_agent: Callable[[], Agent]) -> None:
        self._make_agent = make_agent
        self.agent = make_agent()
        self._stopped = False

    async def run(self) -> None:
        """Serve the node whenever no other agent does, until `stop`.

        Only the first agent requests the node from the agent that serves it. Later agents wait until that agent ends;
        otherwise two processes would replace each other forever.
        """
        outcome = await self.agent.run()
        while outcome is Outcome.HANDED_OVER and not self._stopped:
            self.agent = self._make_agent()
            outcome = await self.agent.run(requests=False)

    def stop(self) -> None:
        """End the present agent, and start no further one."""
        self._stopped = True
        self.agent.stop()
