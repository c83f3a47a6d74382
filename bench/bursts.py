"""Refused bindings when a burst of pods fills a cluster, with the real kube-scheduler.

kube-scheduler calls the filter for the next pods before the Binding of a pod is admitted. So several pods may pass for
the same last card, and all but one of their bindings are refused.

A further webhook delays each Binding, because the API server beside it is faster than one that writes to real disks,
and kube-scheduler on a machine with few cores is slower. So several pods are in flight, as in a real burst.
"""

import os
import random
import ssl
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson

from bench.control_plane import Server, add_nodes, kube_scheduler, mgpu_server, spread
from bench.rows import Options, Row, Skipped
from playground.apiserver import self_signed
from playground.cluster import ASSETS
from playground.processes import free_port
from tests import builders

NODES, PODS, ROUNDS = 56, 1000, 2
_PODS = "/api/v1/namespaces/default/pods"
_PROFILES = ((20, 8192), (30, 16384), (50, 40960), (100, None))
"""The compute in percent of a card, and the memory in MiB. The cluster has room for nine tenths of the pods."""
_SETTLE_SECONDS = 3.0
_QUIET_SECONDS = 8.0
"""A turn ends when nothing has been bound for this time. Refused pods are tried again within a few seconds."""
_DELAY_SECONDS = (0.03, 0.15)
"""The shortest and the longest delay of a Binding."""
_REFUSED = b"binding rejected"


@dataclass(frozen=True, slots=True)
class Burst:
    """What one turn has measured. `rate` is the number of pods bound per second until the last binding."""

    bound: int
    refused: int
    rate: float


def rows(options: Options) -> Iterator[Row]:
    assets = Path(os.environ.get(ASSETS, ""))
    if not os.environ.get(ASSETS) or not (assets / "kube-scheduler").is_file():
        raise Skipped(f"{ASSETS} names no directory with etcd, kube-apiserver and kube-scheduler")
    with mgpu_server(assets) as (server, extender):
        add_nodes(server, NODES)
        with slow_bindings(server):
            time.sleep(_SETTLE_SECONDS)
            bursts = [turn(assets, server, extender, number) for number in range(options.repeats(ROUNDS))]
    bound, refused = sum(one.bound for one in bursts), sum(one.refused for one in bursts)
    remark = f"{refused} of {bound + refused} bindings"
    yield Row(what="refused bindings", value=100 * refused / (bound + refused), unit="%", remark=remark)
    rate = bound / sum(one.bound / one.rate for one in bursts)
    yield Row(what="bound until the last card is taken", value=rate, unit="pods/s", more_is_better=True)


def turn(assets: Path, server: Server, extender: str, number: int) -> Burst:
    """Create the pods, start kube-scheduler, and wait until no more pods are bound. The pods are deleted afterwards."""
    log = server.kubeconfig.parent / "logs" / "scheduler.log"
    before = log.read_bytes().count(_REFUSED)
    bodies = [_pod(f"b{number}-{i}", *_PROFILES[i % len(_PROFILES)]) for i in range(PODS)]
    spread(server, PODS, lambda client, i: client.call("POST", _PODS, bodies[i]))
    with kube_scheduler(assets, server, extender, 0):
        began = time.monotonic()
        bound, last = _wait_bound(server)
    refused = log.read_bytes().count(_REFUSED) - before
    server.client().call("DELETE", f"{_PODS}?gracePeriodSeconds=0")
    return Burst(bound, refused, bound / (last - began))


def _wait_bound(server: Server) -> tuple[int, float]:
    """Wait until nothing is bound any more. Return how many pods are bound, and when the last one was."""
    client = server.client()
    bound, last = 0, time.monotonic()
    while time.monotonic() - last < _QUIET_SECONDS:
        items = orjson.loads(client.call("GET", f"{_PODS}?fieldSelector=spec.nodeName%21%3D"))["items"]
        if len(items) != bound:
            bound, last = len(items), time.monotonic()
        time.sleep(0.25)
    return bound, last


class _Delay(BaseHTTPRequestHandler):
    """A webhook that allows everything after a while."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        review = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(random.uniform(*_DELAY_SECONDS))
        answer = {"uid": review["request"]["uid"], "allowed": True}
        body = orjson.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def slow_bindings(server: Server) -> Iterator[None]:
    """Delay each Binding before mgpu decides about it. Webhooks are called in the order of their names."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        certificate, key = self_signed(Path(name))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        port = free_port()
        endpoint = ThreadingHTTPServer(("127.0.0.1", port), _Delay)
        endpoint.socket = context.wrap_socket(endpoint.socket, server_side=True)
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        bundle = b64encode(Path(certificate).read_bytes()).decode()
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/binding"], "operations": ["CREATE"]}
        webhook = {
            "name": "delay.bench.mgpu.io",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/", "caBundle": bundle},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "rules": [rule],
        }
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        server.client().call("POST", path, orjson.dumps({"metadata": {"name": "0-delay"}, "webhooks": [webhook]}))
        try:
            yield
        finally:
            endpoint.shutdown()


def _pod(name: str, core: int, mib: int | None) -> bytes:
    pod = builders.pod(name, builders.container("c", core, mib))
    return orjson.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]})
