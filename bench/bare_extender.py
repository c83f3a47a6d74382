"""A scheduler extender that lets every node pass, with as little work as Python allows: a thread for each connection.

`bench.control_plane` runs it as `python -m bench.bare_extender PORT`. It is what an extender in Python costs at least.
"""

import socket
import sys
import threading
from typing import Any, BinaryIO

import orjson


def main() -> None:
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
        while True:
            peer, _ = server.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve, args=(peer,), daemon=True).start()


def _serve(peer: socket.socket) -> None:
    with peer, peer.makefile("rb") as stream:
        while line := stream.readline():
            names = orjson.loads(_body(stream)).get("NodeNames") or []
            data = orjson.dumps(_answer(line.split()[1], names))
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            peer.sendall(head.encode() + data)


def _body(stream: BinaryIO) -> bytes:
    length = 0
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return stream.read(length)


def _answer(path: bytes, names: list[str]) -> Any:
    if path == b"/filter":
        return {"NodeNames": names, "FailedNodes": {}}
    return [{"Host": name, "Score": 0} for name in names]


if __name__ == "__main__":
    main()
