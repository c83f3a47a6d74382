"""A server for the tests, with one worker: `python -m tests.mgpu.serving.sample DIRECTORY [PORT | MODE]`.

Without PORT and MODE it has three addresses: TLS, plain, and another app over TLS for clients whose certificate the
server's own CA has signed. With PORT it has two plain addresses with this port: 127.0.0.1, and 127.0.0.2 for the other
app. The modes are:

- impatient: the three addresses, with little time and few connections for clients. It prints the clients that it
  disconnects.
- ends: the three addresses. On SIGTERM it prints `ends` and waits for the file `ended` in the directory. Its threads
  hardly wait for requests or lingering clients.
- strangers: two addresses: TLS for clients with a certificate, and plain on all addresses of this host.
- door: two addresses, TLS and plain, that only 127.0.0.5 may call.
- open: one address with TLS that every address may call. It logs warnings to stdout.
"""

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flask import Response
from gunicorn.workers import gthread

from mgpu.model.addresses import read_block
from mgpu.model.errors import RetryLater
from mgpu.serving import patience, worker
from mgpu.serving.app import new_app, serve_probes, serve_reviews
from mgpu.serving.callers import Callers
from mgpu.serving.review import Reply, Review, allow
from mgpu.serving.server import Listen, serve

LARGE = bytes(64 << 20)  # more than the kernel buffers for a client that does not read


def answer(review: Review) -> Reply:
    if review.name == "later":
        raise RetryLater("another replica leads")
    return allow(review, [{"op": "add", "path": "/a", "value": "x"}])


def main(directory: Path, port: int = 0, end: Callable[[], None] | None = None) -> None:
    started: list[str] = []

    def stop() -> None:
        started.clear()
        print("stopped", flush=True)

    app = new_app()
    serve_reviews(app, "/review", answer, kinds=("Pod",))
    serve_probes(app, lambda: None if started else "not started")
    app.add_url_rule("/large", "large", lambda: Response(LARGE))
    app.add_url_rule("/slow", "slow", lambda: Response(slow()))
    other = new_app()
    serve_probes(other)
    vouched = Listen("127.0.0.1", 0, other.wsgi_app, client_ca=str(directory / "ca.crt"))
    plain = Listen("127.0.0.1", port, app.wsgi_app, tls=False)
    beside = Listen("127.0.0.2", port, other.wsgi_app, tls=False)
    serve(
        [plain, beside] if port else [Listen("127.0.0.1", 0, app.wsgi_app), plain, vouched],
        threads=8,  # so few that a test can occupy all of them
        certificate=(directory / "tls.crt", directory / "tls.key"),
        start=lambda: started.append("started"),
        end=end,
        stop=stop,
    )


def door(directory: Path, *blocks: str, addresses: int) -> None:
    app = new_app()
    serve_reviews(app, "/review", answer, kinds=("Pod",))
    serve_probes(app)
    callers = Callers("test.apiServers", tuple(map(read_block, blocks)))
    listen = [Listen("127.0.0.1", 0, app.wsgi_app, tls=tls, callers=callers) for tls in (True, False)]
    serve(listen[:addresses], threads=8, certificate=(directory / "tls.crt", directory / "tls.key"))


def strangers(directory: Path) -> None:
    app = new_app()
    serve_probes(app)
    app.add_url_rule("/large", "large", lambda: Response(LARGE))
    vouched = Listen("127.0.0.1", 0, app.wsgi_app, client_ca=str(directory / "ca.crt"))
    certificate = (directory / "tls.crt", directory / "tls.key")
    serve([vouched, Listen("0.0.0.0", 0, app.wsgi_app, tls=False)], threads=64, certificate=certificate)


def ends(directory: Path) -> None:
    print("ends", flush=True)
    while not (directory / "ended").exists():
        time.sleep(0.01)


def slow() -> Iterator[bytes]:
    """Yield an answer that takes longer than the impatient server waits for clients."""
    yield b"first "
    time.sleep(1.3)
    yield b"last"


def impatient(directory: Path) -> None:
    patience.PATIENCE_SECONDS = 1.0
    worker.CONNECTIONS = 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    said = logging.StreamHandler(sys.stdout)
    said.setFormatter(logging.Formatter("not waited for: %(client)s"))
    log = logging.getLogger(patience.__name__)
    log.addHandler(said)
    log.setLevel(logging.INFO)
    main(directory)


if __name__ == "__main__":
    if sys.argv[2:] == ["impatient"]:
        impatient(Path(sys.argv[1]))
    elif sys.argv[2:] == ["ends"]:
        gthread.DEFAULT_WORKER_DATA_TIMEOUT = gthread.STOP_KEEPALIVE_LINGER = 0.01
        main(Path(sys.argv[1]), end=lambda: ends(Path(sys.argv[1])))
    elif sys.argv[2:] == ["strangers"]:
        strangers(Path(sys.argv[1]))
    elif sys.argv[2:] == ["door"]:
        door(Path(sys.argv[1]), "127.0.0.5", addresses=2)
    elif sys.argv[2:] == ["open"]:
        logging.basicConfig(stream=sys.stdout, format="said: %(message)s")
        door(Path(sys.argv[1]), "0.0.0.0/0", addresses=1)
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0)
