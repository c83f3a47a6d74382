"""The part of the kubelet's own HTTPS server that `kubectl logs` needs; the API server passes the request on."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playground.apiserver import self_signed
from playground.runtime import Runtime

_POLL_SECONDS = 0.05
"""How long a stop may take."""


class LogServer:
    """GET `/containerLogs/<namespace>/<pod>/<container>` on a free port of loopback, for anybody."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, text = _answer(self.path.partition("?")[0], runtime)
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not worth a line each."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self_signed(folder))
        # The handshake belongs to the connection's own thread: nobody can hold up the others with it.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), name="logs", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(path: str, runtime: Runtime) -> tuple[int, bytes]:
    match path.split("/"):
        case ["", "containerLogs", namespace, pod, container]:
            try:
                return 200, runtime.logs(namespace, pod, container).encode()
            except KeyError as error:
                return 400, str(error.args[0]).encode()
        case _:
            return 404, b"not found"
