"""A scheduler extender over HTTP for the tests."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from tests.playground.fake_cluster import Json


class FakeExtender:
    """Answers /filter and /prioritize as configured by its attributes, and records the requests."""

    def __init__(self) -> None:
        self.refuse: dict[str, str] = {}
        self.scores: dict[str, Any] = {}
        self.null = False
        self.status = 200
        self.asked: list[tuple[str, Json]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body))
                answer = orjson.dumps(outer.answer(self.path, body))
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Json) -> Any:
        names = body["NodeNames"]
        if path == "/prioritize":
            return [{"Host": name, "Score": self.scores.get(name, 0)} for name in names]
        if self.null:
            return {"NodeNames": None}
        left = [name for name in names if name not in self.refuse]
        failed = {name: self.refuse[name] for name in names if name in self.refuse}
        return {"NodeNames": left, "FailedNodes": failed}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
