"""Unix sockets and gRPC servers on them, as the services for the kubelet use them."""

import asyncio
import os
import socket
from pathlib import Path

import grpc

CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
"""The options of a channel to a unix socket. Channels must not share connections, because a connection that another
channel opened could lead to an earlier process at the same path."""

FileStamp = tuple[int, int, int]
"""A value that identifies a file (`file_stamp`)."""


def file_stamp(path: Path) -> FileStamp | None:
    """Return a value that distinguishes this file from a later one at the same path; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def is_listening(path: Path) -> bool:
    """Return whether a process listens on the socket. A process that was killed leaves a file without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def new_server() -> grpc.aio.Server:
    # With SO_REUSEPORT, which is gRPC's default, two servers on one path would share the calls.
    return grpc.aio.server(options=[("grpc.so_reuseport", 0)])


def listen(server: grpc.aio.Server, path: Path) -> None:
    """Let the server listen on a socket. Raises OSError."""
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:  # gRPC raises no other error here.
        raise OSError(str(error)) from error


async def stop_server(server: grpc.aio.Server, grace_seconds: float = 1.0) -> None:
    """Stop the server. If this coroutine is cancelled meanwhile, raise the CancelledError once the server has stopped.

    `Server.stop` awaits `asyncio.wait_for`, which in Python 3.11 loses a cancellation that arrives when it returns. A
    caller that awaits `Server.stop` directly would continue although it was cancelled.
    """
    stopping = asyncio.create_task(server.stop(grace_seconds))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await stopping
        raise
