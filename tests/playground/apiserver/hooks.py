"""Admission webhooks for the tests: an HTTPS server with an answer per path, which records its requests."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playground.apiserver import self_signed
from tests.playground.apiserver.api import Api

Answer = Callable[[Any], dict[str, Any]]
_REGISTRATION = "/apis/admissionregistration.k8s.io/v1"


def allow(**more: Any) -> Answer:
    return lambda _: {"allowed": True, **more}


def deny(message: str = "", code: int = 0) -> Answer:
    status = ({"message": message} if message else {}) | ({"code": code} if code else {})
    return lambda _: {"allowed": False, "status": status}


def patched(*operations: Any, **more: Any) -> Answer:
    encoded = base64.b64encode(json.dumps(operations).encode()).decode()
    return lambda _: {"allowed": True, "patchType": "JSONPatch", "patch": encoded, **more}


def annotated(key: str, value: str) -> Answer:
    """Sets one annotation, whether or not there are any."""

    def answer(request: Any) -> dict[str, Any]:
        missing = "annotations" not in request["object"]["metadata"]
        path, content = ("annotations", {key: value}) if missing else (f"annotations/{key}", value)
        return patched({"op": "add", "path": f"/metadata/{path}", "value": content})(request)

    return answer


class Hooks:
    def __init__(self, api: Api, namespace: str, url: str, ca: bytes) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.url, self._ca = url, base64.b64encode(ca).decode()
        self._api, self._namespace = api, namespace
        self._answers: dict[str, Answer] = {}
        self._made: list[str] = []

    def answer(self, path: str, review: Any) -> Any:
        self.asked.append((path, review["request"]))
        response = self._answers[path](review["request"])
        return {**review, "request": None, "response": {"uid": review["request"]["uid"], **response}}

    def requests(self, path: str) -> list[Any]:
        return [request for asked, request in self.asked if asked == path]

    def add(
        self,
        path: str,
        answer: Answer,
        *,
        mutating: bool = True,
        resources: list[str] | None = None,
        client: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Register a webhook `<path>.test.mgpu.io`; `client` is merged into its clientConfig, `more` are its fields."""
        self._answers[path] = answer
        rule = {"operations": ["*"], "apiGroups": [""], "apiVersions": ["v1"], "resources": resources or ["pods"]}
        hook = {
            "name": f"{path}.test.mgpu.io",
            "clientConfig": {"caBundle": self._ca} | (client or {"url": f"{self.url}/{path}"}),
            "rules": [rule],
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}},
            "timeoutSeconds": 5,
            **more,
        }
        index = len(self._made)
        canary = {**hook, "name": "canary.test.mgpu.io", "failurePolicy": "Fail", "matchConditions": []}
        canary |= {"clientConfig": {"url": f"{self.url}/canary-{index}", "caBundle": self._ca}}
        canary |= {"rules": [{**rule, "resources": ["configmaps"]}], "sideEffects": "None", "objectSelector": {}}
        plural = f"{'mutating' if mutating else 'validating'}webhookconfigurations"
        name = f"{self._namespace}-{index}"
        self._answers[f"canary-{index}"] = allow()
        self._api.ok("POST", f"{_REGISTRATION}/{plural}", {"metadata": {"name": name}, "webhooks": [hook, canary]})
        self._made.append(f"{_REGISTRATION}/{plural}/{name}")
        self._wait_until_used(f"canary-{index}")

    def _wait_until_used(self, canary: str) -> None:
        """Wait until the server calls the canary: a real one reads webhook configurations from a cache."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            path = f"/api/v1/namespaces/{self._namespace}/configmaps?dryRun=All"
            self._api.ok("POST", path, {"metadata": {"name": "canary"}})
            if self.requests(canary):
                return
        raise TimeoutError(f"{canary} is never called")

    def remove(self) -> None:
        for path in self._made:
            self._api.ok("DELETE", path)

    @classmethod
    @contextmanager
    def served(cls, api: Api, namespace: str, folder: Path) -> Iterator["Hooks"]:
        certificate, key = self_signed(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(hooks.answer(self.path.strip("/").partition("?")[0], review)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(OSError):  # the API server no longer waits: the test of its timeout
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        hooks = cls(api, namespace, f"https://127.0.0.1:{server.server_address[1]}", Path(certificate).read_bytes())
        thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hooks
        finally:
            hooks.remove()
            server.shutdown()
            server.server_close()
            thread.join(timeout=10)
