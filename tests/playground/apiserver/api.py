"""A thin HTTP client for the contract tests: replies as they are, watches as lists of events."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

MERGE, JSON = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


@dataclass(frozen=True)
class Reply:
    code: int
    body: Any
    warnings: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        return str(self.body.get("reason", ""))

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))

    @property
    def rv(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])


class Api:
    def __init__(self, url: str, ca: str, token: str, kubeconfig: Path, *, real: bool) -> None:
        self.url, self.ca, self.kubeconfig, self.real = url, ca, kubeconfig, real
        self._token = token
        self._pool = urllib3.PoolManager(ca_certs=ca, timeout=30.0)

    def close(self) -> None:
        self._pool.clear()

    def _headers(self, **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Accept": "application/json"} | more

    def call(
        self, method: str, path: str, body: Any = None, *, media: str = "application/json", **headers: str
    ) -> Reply:
        """`body` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = self._headers(**{"Content-Type": media, **headers})
        answer = self._pool.request(method, self.url + path, body=data, headers=sent, redirect=False)
        text = answer.data.decode()
        parsed = json.loads(text) if answer.headers.get("Content-Type", "").startswith("application/json") else text
        return Reply(answer.status, parsed, answer.headers.getlist("Warning"))

    def ok(self, method: str, path: str, body: Any = None, **more: str) -> Any:
        """The body of a reply that must be a success."""
        reply = self.call(method, path, body, **more)
        assert reply.code < 300, reply
        return reply.body

    def patch(self, path: str, body: Any, media: str = MERGE) -> Reply:
        return self.call("PATCH", path, body, media=media)

    def get(self, path: str) -> Any:
        return self.ok("GET", path)

    def watch(self, path: str, rv: str, count: int, *, seconds: int = 10, **headers: str) -> list[Any]:
        """The first `count` events after `rv`; fewer only when `seconds` have passed."""
        return list(self.events(path, rv, lambda found: len(found) >= count, seconds=seconds, **headers))

    def events(
        self, path: str, rv: str, enough: Callable[[list[Any]], bool], *, seconds: int = 10, **headers: str
    ) -> Iterator[Any]:
        sep = "&" if "?" in path else "?"
        url = f"{self.url}{path}{sep}watch=1&timeoutSeconds={seconds}" + (f"&resourceVersion={rv}" if rv else "")
        sent = self._headers(**headers)
        answer = self._pool.request("GET", url, headers=sent, preload_content=False, timeout=seconds + 20.0)
        found: list[Any] = []
        try:
            assert answer.status == 200, answer.data
            for line in answer:
                found.append(json.loads(line))
                yield found[-1]
                if enough(found):
                    return
        finally:
            # An unread stream must not go back to the pool.
            answer.close()


def pod(name: str = "p", *, image: str = "cuda", resources: Any = None, spec: Any = None, **metadata: Any) -> Any:
    """A pod as a user writes it."""
    container = {"name": "c", "image": image} | ({"resources": resources} if resources else {})
    return {"metadata": {"name": name, **metadata}, "spec": {"containers": [container], **(spec or {})}}


def binding(name: str = "p", node: str = "n1", **metadata: Any) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, **metadata},
        "target": {"kind": "Node", "name": node},
    }
