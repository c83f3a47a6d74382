"""An API server that only serves what a scheduler process reads when it starts.

`python -m bench.apistub NODES KEY` prints the address of the server. The server lists Nodes, Devices and Pods in pages,
and its watches deliver no events. `bench.startup` starts it.

The Pods and Nodes are as large as real ones, because most of the work at the start is proportional to their size.
`data/pod.json` and `data/node.json` are what Kubernetes 1.36 answered for a pod of a Deployment with seven variables,
two probes and three volumes, and for its node. Each pod here also has a GPU request and a sealed allocation record, and
takes 9.5 KB. Each node has 30 images, and takes 7.4 KB.
"""

import random
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from bench.clusters import CARDS, PODS, running
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import Node
from mgpu.model.record_seals import Keys, Signer, Subject
from tests import builders as b

Lists = dict[str, list[bytes]]

SINCE = "2026-01-01T00:00:00Z"
_DATA = Path(__file__).parent / "data"
_IMAGES = 30
WORKLOADS = 250
"""The number of workloads that created the pods. Their requests differ; on every second node they are larger."""


def lists(nodes: int, key: Ed25519PrivateKey) -> Lists:
    """Return the items of each API path as JSON."""
    records = RecordVerifier(Keys(SINCE, {}, Signer(key)))
    names = [f"node-{i}" for i in range(nodes)]
    devices = (write_device(Node(name), "", b.cards(CARDS, node=name)) for name in names)
    made: dict[str, Iterator[dict[str, Any]]] = {
        "/api/v1/nodes": map(_node, names),
        f"/apis/{DEVICE_API}/devices": devices,
        "/api/v1/pods": _pods(nodes, records),
    }
    return {path: [*_encoded(items)] for path, items in made.items()}


def _encoded(items: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for i, item in enumerate(items, 1):
        own = {"uid": str(UUID(int=i)), "resourceVersion": str(10_000_000 + i)}
        yield orjson.dumps({**item, "metadata": {**own, **item["metadata"]}})


def _node(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = orjson.loads((_DATA / "node.json").read_bytes())
    small = b.node(name)
    meta = {key: value for key, value in raw["metadata"].items() if key not in ("uid", "resourceVersion")}
    labels = {**meta["labels"], **small["metadata"]["labels"], "kubernetes.io/hostname": name}
    digest = sha256(name.encode()).hexdigest()
    images = [{"names": [f"registry.example/team/image-{i}@sha256:{digest}"], "sizeBytes": i} for i in range(_IMAGES)]
    return {
        **raw,
        "metadata": {**meta, "name": name, "labels": labels},
        "status": {**raw["status"], **small["status"], "images": images},
    }


def _pods(nodes: int, records: RecordVerifier) -> Iterator[dict[str, Any]]:
    pick = random.Random(0)
    for i in range(nodes):
        for j in range(PODS):
            workload = pick.randrange(WORKLOADS)
            yield _pod(running(f"w{workload}-{i}-{j}", i, workload), workload, records)


def _pod(small: dict[str, Any], workload: int, records: RecordVerifier) -> dict[str, Any]:
    """Return a real pod with the name, the node, the request and the record of a small one."""
    raw: dict[str, Any] = orjson.loads((_DATA / "pod.json").read_bytes())
    meta = raw["metadata"]
    name, node = small["metadata"]["name"], small["spec"]["nodeName"]
    uid = str(UUID(bytes=random.Random(name).randbytes(16), version=4))
    record = records.sealed(Subject(uid, meta["namespace"], name, node), small["metadata"]["annotations"])
    meta |= {"name": name, "uid": uid, "annotations": {**meta["annotations"], **record}}
    meta["labels"] |= {"app.kubernetes.io/instance": f"w{workload}", "pod-template-hash": f"{workload:010x}"}
    del meta["resourceVersion"]
    for kind, amounts in small["spec"]["containers"][0]["resources"].items():
        raw["spec"]["containers"][0]["resources"][kind] |= amounts
    raw["spec"]["nodeName"] = node
    return raw


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
            body = b'{"kind":"List","metadata":{"resourceVersion":"90000000"%s},"items":[%s]}' % (more, some)
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


def main(nodes: int, key: Path) -> None:
    private = load_pem_private_key(key.read_bytes(), None)
    assert isinstance(private, Ed25519PrivateKey)
    serve(lists(nodes, private))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
