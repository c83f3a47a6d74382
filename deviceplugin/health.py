"""`/healthz` and `/readyz` over plain HTTP, by the standard library alone: the agent has to stay small."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HealthServer:
    """`healthy` and `ready` say what is wrong, "" where nothing: then 200 and `ok`, else 503 and the reason."""

    def __init__(self, port: int, healthy: Callable[[], str], ready: Callable[[], str], host: str = "") -> None:
        checks = {"/healthz": healthy, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                check = checks.get(self.path.partition("?")[0])
                problem = "not found" if check is None else check()
                body = f"{problem or 'ok'}\n".encode()
                self.send_response(404 if check is None else 503 if problem else 200)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Probes are not worth a line each."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
