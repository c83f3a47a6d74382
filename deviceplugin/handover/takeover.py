"""The protocol by which a new agent takes the node over from the one that serves it, while pods keep starting.

In a rolling update with surge both agents run for some seconds. If a resource has no healthy device while the kubelet
admits a pod that requests it, the pod fails for good. When the device list (ListAndWatch) of *any* agent ends, the
kubelet disconnects the agent that was registered last, and marks all devices of the resource as unhealthy
(devicemanager/plugin/v1beta1/handler.go, `runClient`). So the order of the steps matters:

1. The new agent reads cards and pods, and then sends "take over".
2. The old agent stops writing, and holds new calls of the kubelet back. It releases the lock of the node and answers
   "yours". Its device lists stay open, so the kubelet goes on admitting pods.
3. The new agent takes the lock, reads which cards were delivered (CDI files, checkpoint), and registers. From here on
   the kubelet sends new calls to it. The devices stay healthy, since both agents offer the same ones.
4. The new agent withdraws each resource: it registers once more and refuses to report its options. The kubelet then
   only forgets which agent to disconnect, so the end of a device list has no effect.
5. The new agent sends "registered" with its sockets. The old agent forwards the calls that it held back to these
   sockets, ends its device lists, and answers "ended".
6. The new agent ends its own device lists, which has no effect either, and registers again. From now on the kubelet
   notices when this agent ends.

An agent that has handed the node over sends "stand by". If the serving agent is then stopped, as in a rolling update
that is reverted halfway, it answers "yours", and steps 2 to 6 follow in the same way.

If a step fails, the lock decides: it is free as soon as its holder has ended, and an agent that stands by takes it. The
resources then have no healthy devices until that agent has registered.

This module sends and receives the messages, and `handover.node_ownership` carries out the steps. Agents of different
versions communicate with each other, so neither the messages nor their order may change.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

log = logging.getLogger(__name__)

SOCKET = "mgpu-agent.sock"
"""The name of the socket in the kubelet's device-plugins folder, on which the agent that serves the node listens. The
kubelet removes the socket when it starts, and the agent creates it again."""
_TAKE_OVER = "take over"
_STAND_BY = "stand by"
_YOURS = "yours"
_REGISTERED = "registered"
_ENDED = "ended"
_ANSWER_SECONDS = 20.0
"""How long an agent waits for the next message of the other one, unless it stands by."""
_GREETING_SECONDS = 5.0
"""How long an agent that has connected may take to send its first message."""
_CHECK_SECONDS = 1.0
"""The interval at which the agent checks that its socket still exists."""

Sockets = Mapping[str, str]
"""For each resource, the file name of the plugin's socket."""


class Peer:
    """A connection to another agent of the node. The connection ends when that agent ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof()

    async def receive(self, seconds: float | None = _ANSWER_SECONDS) -> list[str] | None:
        """Return the next message, split into its words; None if the peer has ended or does not answer in time."""
        try:
            async with asyncio.timeout(seconds):
                line = await self._reader.readline()
        except (TimeoutError, OSError, ValueError):
            return None
        return line.decode(errors="replace").strip().split("\t") if line.endswith(b"\n") else None

    async def send(self, *words: str) -> None:
        """Send a message of several words. Do nothing if the peer has ended."""
        with contextlib.suppress(OSError):
            self._writer.write("\t".join(words).encode() + b"\n")
            await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()


class Predecessor:
    """The agent that this one takes over from."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def finish(self, sockets: Sockets) -> bool:
        """Send "registered". Return whether the predecessor has answered that its device lists have ended.

        Args:
            sockets: The sockets of the resources that this agent has registered.
        """
        await self._peer.send(_REGISTERED, json.dumps(dict(sockets)))
        answer = await self._peer.receive()
        self._peer.close()
        return answer is not None and answer[0] == _ENDED

    def hang_up(self) -> None:
        """Close the connection, because this agent does not take over."""
        self._peer.close()


class Successor:
    """The agent that takes over from this one."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @property
    def has_ended(self) -> bool:
        return self._peer.has_ended

    async def hand_over(self) -> Sockets | None:
        """Send "yours". Return the successor's sockets once it has registered, or None if it does not answer."""
        await self._peer.send(_YOURS)
        answer = await self._peer.receive()
        try:
            if answer is not None and answer[0] == _REGISTERED:
                return {str(resource): str(name) for resource, name in json.loads(answer[1]).items()}
        except (IndexError, ValueError, AttributeError):
            log.warning("unexpected message from the agent that takes over: %s", answer)
        return None

    async def confirm_end(self) -> None:
        """Send "ended", and close the connection."""
        await self._peer.send(_ENDED)
        self._peer.close()

    def hang_up(self) -> None:
        """Close the connection, because this agent does not hand the node over."""
        self._peer.close()


async def request(folder: Path) -> Predecessor | None:
    """Request the node from the agent that serves it. Return None if that agent does not hand it over in time."""
    return await _connect(folder, _TAKE_OVER, _ANSWER_SECONDS)


async def stand_by(folder: Path) -> Predecessor | None:
    """Wait until the agent that serves the node hands it over. Return None if there is none, or if it ends first."""
    return await _connect(folder, _STAND_BY, None)


async def _connect(folder: Path, word: str, seconds: float | None) -> Predecessor | None:
    try:
        reader, writer = await asyncio.open_unix_connection(folder / SOCKET)
    except OSError:
        return None
    peer = Peer(reader, writer)
    try:
        await peer.send(word)
        answer = await peer.receive(seconds)
    except asyncio.CancelledError:
        peer.close()
        raise
    if answer is None or answer[0] != _YOURS:
        peer.close()
        return None
    return Predecessor(peer)


class OtherAgents:
    """The agents that have connected to this agent, which serves the node.

    Attributes:
        successor: A future. Its result is the first agent that requests the node.
    """

    def __init__(self) -> None:
        self.successor: asyncio.Future[Successor] = asyncio.get_running_loop().create_future()
        self._standing_by: list[Successor] = []

    def standing_by(self) -> Successor | None:
        """Return the agent that has stood by last and is still connected, or None."""
        return next((other for other in reversed(self._standing_by) if not other.has_ended), None)

    def hang_up(self) -> None:
        """Close all connections, so that agents that stand by connect to the next agent that serves the node.

        Agents that stand by wait for an answer without a limit. Without this call they would wait until the process of
        this agent ends, although it no longer serves the node.
        """
        for other in (*self._standing_by, *([self.successor.result()] if self.successor.done() else ())):
            other.hang_up()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the first message on a new connection, and keep the agent as the successor or as one that stands by."""
        peer = Peer(reader, writer)
        message = await peer.receive(_GREETING_SECONDS)
        if message == [_TAKE_OVER] and not self.successor.done():
            self.successor.set_result(Successor(peer))
        elif message == [_STAND_BY]:
            self._standing_by = [*(other for other in self._standing_by if not other.has_ended), Successor(peer)]
        else:
            peer.close()


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[OtherAgents]:
    """Accept connections from the other agents of the node while the context is active."""
    others = OtherAgents()
    task = asyncio.create_task(_listen(folder / SOCKET, others))
    try:
        yield others
    finally:
        others.hang_up()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _listen(path: Path, others: OtherAgents) -> None:
    """Listen on the path until cancelled. Create the socket again when a kubelet that starts has removed it.

    A socket that another agent creates at this path later is not replaced, because that agent then serves the node.
    """
    while True:
        try:
            path.unlink(missing_ok=True)
            # With start_serving, a cancellation in this call would leave the socket open.
            server = await asyncio.start_unix_server(others.accept, path, start_serving=False)
        except OSError as error:
            log.warning("cannot listen for agents that request the node: %s: %s", path, error)
            await asyncio.sleep(_CHECK_SECONDS)
            continue
        inode = _inode(path)
        try:
            await server.start_serving()
            while _inode(path) is not None:
                await asyncio.sleep(_CHECK_SECONDS)
        finally:
            # Only the listener is closed: the connection on which the node is handed over stays open.
            server.close()
            if inode is not None and _inode(path) == inode:
                path.unlink(missing_ok=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
