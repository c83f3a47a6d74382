"""An API server that only serves what a scheduler process reads when it starts.

`python -m bench.apistub NODES` prints the address of the server. The server lists Nodes, Devices and Pods in pages, and
its watches deliver no events. `bench.startup` starts it.
"""

import random
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from bench.clusters import CARDS, PODS, running
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import Node
from tests import builders as b

Lists = dict[str, list[bytes]]


def lists(nodes: int) -> Lists:
    """Return the items of each API path as JSON."""
    pick, names = random.Random(0), [f"node-{i}" for i in range(nodes)]
    devices = [write_device(Node(name), "", b.cards(CARDS, node=name)) for name in names]
    pods = [_grown(running(f"{i}-{j}", i, pick.randrange(1 << 30))) for i in range(nodes) for j in range(PODS)]
    made: dict[str, list[dict[str, Any]]] = {
        "/api/v1/nodes": [b.node(name) for name in names],
        f"/apis/{DEVICE_API}/devices": devices,
        "/api/v1/pods": pods,
    }
    for item in (item for items in made.values() for item in items):
        item["metadata"] |= {"uid": item["metadata"].get("uid", item["metadata"]["name"]), "resourceVersion": "1"}
    return {path: [orjson.dumps(item) for item in items] for path, items in made.items()}


def _grown(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the pod with more fields, so that it is as large as an ordinary pod (about 4 KiB)."""
    fields: dict[str, Any] = {f"f:{i}": {"f:name": {}, "f:value": {}, "f:valueFrom": {}} for i in range(40)}
    managed = [{"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": fields}]
    env = [{"name": f"SETTING_{i}", "value": f"value-{i}"} for i in range(20)]
    container = {**pod["spec"]["containers"][0], "env": env, "command": ["python", "serve.py"] * 4}
    mounts = [{"name": f"volume-{i}", "configMap": {"name": f"settings-{i}"}} for i in range(6)]
    conditions = [{"type": f"Condition{i}", "status": "True", "lastTransitionTime": "2026-01-01"} for i in range(5)]
    return {
        **pod,
        "metadata": {**pod["metadata"], "labels": {"app": "model", "team": "a"}, "managedFields": managed},
        "spec": {**pod["spec"], "containers": [container], "volumes": mounts, "tolerations": [{"key": "gpu"}] * 3},
        "status": {**pod["status"], "conditions": conditions},
    }


def serve(made: Lists) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            if path not in made:
                self.send_error(404)
            elif "watch" in query:
                self._watch()
            else:
                self._page(made[path], int(query.get("continue", ["0"])[0]), int(query.get("limit", ["500"])[0]))

        def _page(self, items: list[bytes], start: int, limit: int) -> None:
            end = start + limit
            more = b',"continue":"%d"' % end if end < len(items) else b""
            some = b",".join(items[start:end])
            body = b'{"kind":"List","metadata":{"resourceVersion":"1"%s},"items":[%s]}' % (more, some)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _watch(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(3600)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(lists(int(sys.argv[1])))
