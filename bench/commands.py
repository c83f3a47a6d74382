"""The commands inspect, top and explain in a large cluster, from the scheduler and from lists of the API server.

The API server is a stub with the objects of `bench.apistub`, which passes requests on to a real scheduler process. Each
command runs in a process of its own, from the start of the interpreter to its last line. The references are the same
commands from lists.
"""

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import orjson
import urllib3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.apistub import Lists, lists
from bench.rows import Options, Row
from bench.serving import Client
from mgpu.cli.scheduler_source import SERVICE
from mgpu.presentation.answers import AUDIENCE, READER
from playground.apiserver import write_kubeconfig
from tests import builders as b
from tests.mgpu.serving.process import Server
from tests.waiting import until

NODES = 5_000
WAITING = "waits"
_ACCOUNT = f"/api/v1/namespaces/mgpu-system/serviceaccounts/{READER}/token"
_PROXY = f"/api/v1/namespaces/mgpu-system/services/{SERVICE}/proxy"
COMMANDS = (("inspect",), ("inspect", "-o", "json"), ("top",), ("explain", WAITING))


def rows(options: Options) -> Iterator[Row]:
    for nodes in options.sizes(NODES):
        with tempfile.TemporaryDirectory() as folder, _cluster(nodes, folder) as worker:
            environ = {**os.environ, "KUBECONFIG": f"{folder}/kubeconfig", "COLUMNS": "100"}
            _run(["top", "--from", "scheduler"], environ)  # The first answer views all nodes.
            for command in COMMANDS:
                what = f"{nodes:,} nodes, {' '.join(command)}"
                before = _cpu_of(worker)
                wall, cpu, first = _run([*command, "--from", "scheduler"], environ)
                served = 1000 * (_cpu_of(worker) - before)
                listed_wall, listed_cpu, listed_first = _run([*command, "--from", "api"], environ)
                for name, unit, value, reference in (
                    ("all", "s", wall, listed_wall),
                    ("first line", "s", first, listed_first),
                    ("CPU", "s CPU", cpu, listed_cpu),
                ):
                    yield Row(
                        what=f"{what}, {name}", value=value, unit=unit, reference=reference, reference_name="from lists"
                    )
                yield Row(what=f"{what}, CPU of the scheduler", value=served, unit="ms CPU")


def _run(arguments: list[str], environ: dict[str, str]) -> tuple[float, float, float]:
    """Return the seconds until the end, the seconds of CPU time, and the seconds until the first output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, "-m", "mgpu.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - began
        while process.stdout.read(1 << 20):
            pass
    if process.returncode:
        raise RuntimeError(f"mgpu {' '.join(arguments)} has ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu, first


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _cluster(nodes: int, folder: str) -> Iterator[int]:
    """Run the stub and a scheduler, and write the kubeconfig. The value is the process ID of the scheduler."""
    made = lists(nodes, Ed25519PrivateKey.generate())
    pod = b.share(WAITING, 60, 20 * 1024)
    pod["metadata"] |= {"resourceVersion": "1"}
    made["/api/v1/pods"].append(orjson.dumps(pod))
    for path in ("/apis/lsalab.nthu/v1/mtgpupods", "/api/v1/namespaces/kube-system/configmaps"):
        made[path] = []
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    stub.daemon_threads = True
    Stub.made = made
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    write_kubeconfig(Path(folder) / "kubeconfig", f"http://127.0.0.1:{stub.server_port}", b"", "admin")
    run = ("-c", "from mgpu.cli.main import main; main()", "scheduler", "--no-leader-elect")
    ports = ("--host", "127.0.0.1", "--port", "0", "--extender-port", "0", "--self-signed-dir", f"{folder}/tls")
    server = Server(*run, *ports, "--kubeconfig", f"{folder}/kubeconfig", addresses=2)
    try:
        Stub.scheduler = f"https://127.0.0.1:{server.ports[0]}"
        until(lambda: _ready(server.ports[1]), 300)
        yield int(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[0])
    finally:
        server.close()
        stub.shutdown()


def _ready(port: int) -> bool:
    try:
        return "ok" in Client(port, 0).get("/leads")
    except RuntimeError:
        return False


class Stub(BaseHTTPRequestHandler):
    """The API server: lists, silent watches, one pod, tokens that are always valid, and the proxy."""

    protocol_version = "HTTP/1.1"
    made: Lists
    scheduler = ""
    pool = urllib3.PoolManager(cert_reqs="CERT_NONE", assert_hostname=False)

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path.startswith(_PROXY):
            self._pass_on()
        elif path == f"/api/v1/namespaces/default/pods/{WAITING}":
            self._send(self.made["/api/v1/pods"][-1])
        elif path not in self.made:
            self._send(b"{}", 404)
        elif "watch" in query:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(float(query["timeoutSeconds"][0]))
            self.wfile.write(b"0\r\n\r\n")
        else:
            start, limit = int(query.get("continue", ["0"])[0]), int(query.get("limit", ["500"])[0])
            items = self.made[path]
            more = b',"continue":"%d"' % (start + limit) if start + limit < len(items) else b""
            some = b",".join(items[start : start + limit])
            self._send(b'{"kind":"List","metadata":{"resourceVersion":"1"%s},"items":[%s]}' % (more, some))

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"{}")

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        user = {"username": f"system:serviceaccount:mgpu-system:{READER}"}
        reviewed = {"authenticated": True, "user": user, "audiences": [AUDIENCE]}
        status = {"token": "valid"} if self.path == _ACCOUNT else reviewed
        self._send(orjson.dumps({**body, "status": status}), 201)

    def _pass_on(self) -> None:
        headers = {key: value for key, value in self.headers.items() if key not in ("Host", "Authorization")}
        url = self.scheduler + self.path.partition("/proxy")[2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # As in kube-apiserver, the certificate is not verified.
            found = self.pool.request("GET", url, headers=headers, decode_content=False)
        kept = {key: value for key, value in found.headers.items() if key not in ("Connection", "Content-Length")}
        self._send(found.data, found.status, kept)

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
