"""The agents of one process, one after the other: after one has handed the node over, the next one stands by."""

from collections.abc import Callable

from deviceplugin.agent import Agent
from deviceplugin.handover.turn import Outcome
from deviceplugin.metrics import Seen
from mgpu.kube.reflector import Reflector


class Shifts:
    """`run` until `stop`. All else is the present agent's, and from any thread.

    Args:
        make: makes another agent with each call.
    """

    def __init__(self, make: Callable[[], Agent]) -> None:
        self._make = make
        self.agent = make()
        self._stopped = False

    async def run(self) -> None:
        """Serve the node whenever no other agent does.

        The first agent asks the one that serves to hand over. Those after it have been replaced, and take over only
        from one that has ended: two would otherwise replace each other for ever.
        """
        outcome = await self.agent.run()
        while outcome is Outcome.HANDED_OVER and not self._stopped:
            self.agent = self._make()
            outcome = await self.agent.run(requests=False)

    def stop(self) -> None:
        self._stopped = True
        self.agent.stop()

    @property
    def node(self) -> str:
        return self.agent.node

    @property
    def watch(self) -> Reflector:
        return self.agent.watch

    def seen(self) -> Seen:
        return self.agent.seen()

    def unhealthy(self) -> str:
        return self.agent.unhealthy()

    def not_ready(self) -> str:
        return self.agent.not_ready()

    def unreported(self) -> str | None:
        return self.agent.unreported()
