"""A server for the tests: `python -m tests.mgpu.serving.sample DIRECTORY [PORT]`, one worker.

Three addresses: TLS, plain, and another app over TLS for clients whose certificate the server's own CA has signed.
With PORT two, both plain and of this port: 127.0.0.1, and 127.0.0.2 for the other app.
"""

import sys
from pathlib import Path

from mgpu.model.errors import RetryLater
from mgpu.serving.app import new_app, probes, reviewing
from mgpu.serving.review import Reply, Review, allow
from mgpu.serving.server import Listen, serve


def answer(review: Review) -> Reply:
    if review.name == "later":
        raise RetryLater("another replica leads")
    return allow(review, [{"op": "add", "path": "/a", "value": "x"}])


def main(directory: Path, port: int = 0) -> None:
    started: list[str] = []
    app = new_app()
    reviewing(app, "/review", answer, kinds=("Pod",))
    probes(app, ready=lambda: "" if started else "not started")
    other = new_app()
    probes(other, ready=str)
    vouched = Listen("127.0.0.1", 0, other.wsgi_app, client_ca=str(directory / "ca.crt"))
    plain = Listen("127.0.0.1", port, app.wsgi_app, tls=False)
    beside = Listen("127.0.0.2", port, other.wsgi_app, tls=False)
    serve(
        [plain, beside] if port else [Listen("127.0.0.1", 0, app.wsgi_app), plain, vouched],
        certificate=(directory / "tls.crt", directory / "tls.key"),
        start=lambda: started.append("started"),
        stop=lambda: print("stopped", flush=True),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
