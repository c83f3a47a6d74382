"""The start of each process and command, and the memory of each process in a pod without work.

The API server is the playground's, with TLS, and the processes connect to it by a service account. The agent has
simulated cards and the playground's kubelet. `anonymous` is the part of the resident memory that is not a mapped file:
unlike the rest, it does not depend on which pages of the libraries the kernel has cached.
"""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.node import CARDS, rss_mib, workers
from bench.rows import Options, Row
from playground.apiserver import ApiServer, User, running
from playground.apiserver.hosting import self_signed
from playground.processes import free_port
from tests.deviceplugin.node import CRD, Node
from tests.waiting import until

PROCESSES = ("webhook", "scheduler", "deviceplugin")
COMMANDS = (("--help",), ("inspect", "--help"), ("doctor", "--help"))
STARTS, IDLE_SECONDS = 10, 10.0


def rows(options: Options) -> Iterator[Row]:
    times = options.repeats(STARTS)
    for arguments in COMMANDS:
        run = [sys.executable, "-m", "mgpu.cli.main", *arguments]
        yield Row(what=f"mgpu {' '.join(arguments)}", value=_cpu_ms(run, times), unit="ms CPU")
    for process in PROCESSES:
        run = [sys.executable, "-c", f"import {process}.main"]
        yield Row(what=f"{process}, imports, CPU", value=_cpu_ms(run, times), unit="ms CPU")
        resident, anonymous = _imports_mib(process)
        yield Row(what=f"{process}, imports, RSS", value=resident, unit="MiB", remark=f"{anonymous:.0f} anonymous")
    yield from _idle(options.seconds(IDLE_SECONDS))


def _cpu_ms(command: Sequence[str], times: int) -> float:
    """Return the least CPU time of a run. The first run, which may write bytecode, does not count."""
    found = []
    for _ in range(times + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1000 * min(found[1:])


def _imports_mib(process: str) -> tuple[float, float]:
    run = f"import sys, {process}.main; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        return rss_mib(started.pid), _anonymous_mib(started.pid)


class TwoAddresses(ApiServer):
    """An API server that also serves plain HTTP, for the kubelet of `Node`."""

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None) -> str:
        self.plain = await super().start(host)
        return await super().start(host, port, tls)


def _idle(seconds: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        folder = Path(name)
        tls = _service_account(folder)
        server = TwoAddresses(tokens={"admin": User("admin", ("system:masters",))})
        with running(server, tls=tls) as url:
            node = Node(server.plain, folder, [{"count": CARDS, "memory": "80Gi"}])
            node.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
            try:
                for process in PROCESSES:
                    with _in_pod(process, folder, url) as pid:
                        if process == "deviceplugin":
                            until(node.healthy_ids, 60)
                        time.sleep(seconds)
                        yield from _memory(process, pid)
            finally:
                node.close()


def _service_account(folder: Path) -> tuple[str, str]:
    """Write the files of a service account, and a certificate for all servers. Return its paths."""
    chain, key = self_signed(folder)
    shutil.copy(chain, folder / "ca.crt")
    (folder / "token").write_text("admin")
    shutil.copy(chain, folder / "tls.crt")
    shutil.copy(key, folder / "tls.key")
    return chain, key


@contextmanager
def _in_pod(process: str, folder: Path, url: str) -> Iterator[int]:
    """Run a process, and yield its ID when it listens."""
    port = free_port()
    own = {
        "webhook": ["--cert-dir", str(folder), "--port", str(port), "--workers", "1", "--metrics-port", "0"],
        "scheduler": ["--cert-dir", str(folder), "--port", str(port), "--extender-port", "0", "--metrics-port", "0"],
        "deviceplugin": [
            *("--node", "n1", "--cards", str(folder / "cards.yaml"), "--health-port", str(port)),
            *("--kubelet-dir", str(folder), "--cdi-dir", str(folder / "cdi")),
        ],
    }
    host, _, api_port = url.removeprefix("https://").rpartition(":")
    where = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": api_port, "KUBECONFIG": str(folder / "none")}
    run = [sys.executable, "-m", "bench.in_pod", str(folder), process, *own[process]]
    out = subprocess.DEVNULL
    with subprocess.Popen(run, env={**os.environ, **where}, stdout=out, stderr=out) as started:
        try:
            until(lambda: _listens(port))
            yield started.pid
        finally:
            started.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _memory(process: str, pid: int) -> Iterator[Row]:
    children = workers(pid)
    names = [
        (pid, f"{process}, parent" if children else process),
        *((child, f"{process}, worker") for child in children),
    ]
    for each, name in names:
        said = f"{_anonymous_mib(each):.0f} anonymous"
        yield Row(what=f"{name}, idle, RSS", value=rss_mib(each), unit="MiB", remark=said)


def _anonymous_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024
