"""Measures how much longer ordinary pods of one tenant wait to be bound under the hostile load of another tenant.

The load has five parts, which run together at fixed rates: pods whose placement is hard to compute, very large objects,
a flood of creates and deletes, large bodies that are sent to the admission endpoints directly, and connections that
never send a request. The ordinary tenant creates one small pod after the other. Its delay under load is compared with
its delay on the same cluster at rest, before and after the load. Every second pod requests no GPU, so mgpu is not
called for it. The delay of these pods shows what the load costs the API server and kube-scheduler alone. The memory of
each process is compared with its limit in `manifests/base`.

If KUBEBUILDER_ASSETS is set, the API server is a real one. `--kube-scheduler` names a real kube-scheduler to use
instead of the playground's scheduling loop. Both share the machine's cores with the load. `python -m bench.hostile`
runs it, and `make bench` does not. The exit code is 1 if a process has exceeded its memory limit, if a GPU pod was not
bound under load, or if the median delay of GPU pods under load is more than twice that at rest.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.attackers import ATTACKS, PODS, Target, attacking
from bench.endtoend import add_nodes
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from mgpu.model.quantities import whole_bytes
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from tests.builders import share

NODES, CARDS = 20, 8
_ORDINARY_SECONDS = 0.5
_GIVE_UP_SECONDS = 60.0
_SPECS: Mapping[str, Mapping[str, Any]] = {
    "GPU": share("p", core=20, mib=4096)["spec"],
    "plain": {"containers": [{"name": "c", "image": "x"}]},
}
_LIMITS = {"webhook": "webhook-deployment.yaml", "scheduler": "scheduler-deployment.yaml"}


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays of the pods of one kind in one phase.

    Attributes:
        seconds: The times from the create request to the binding of each pod that was bound. If none was bound, it
            contains only the time after which a pod counts as lost.
        lost: The number of pods that were not created or not bound in time.
    """

    seconds: tuple[float, ...]
    lost: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        return sorted(self.seconds)[int(0.95 * (len(self.seconds) - 1))]


def main(arguments: Sequence[str] | None = None) -> int:
    exit_code = "The exit code is " + __doc__.partition("The exit code is ")[2]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog=exit_code)
    parser.add_argument("--minutes", type=float, default=20.0, help="how many minutes the load lasts (default: 20)")
    text = "how many minutes the delay at rest is measured, before and again after the load (default: 1)"
    parser.add_argument("--idle-minutes", type=float, default=1.0, help=text)
    parser.add_argument("--kube-scheduler", help="a kube-scheduler binary to use instead of the playground's loop")
    parser.add_argument("--only", choices=sorted(ATTACKS), action="append", help="run only this attack; repeatable")
    parser.add_argument("--control", action="store_true", help="run the same load on a cluster that never calls mgpu")
    options = parser.parse_args(arguments)
    if options.control and not options.kube_scheduler:
        parser.error("--control needs --kube-scheduler, because the playground's loop would still call the extender")
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster([], config=stack.enter_context(_settings())))
        add_nodes(cluster.api, NODES, CARDS)
        for namespace in ("ordinary", "hostile"):
            cluster.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        if options.kube_scheduler:
            cluster.scheduling.stop()
            stack.enter_context(_kube_scheduler(Path(options.kube_scheduler), cluster, extender=not options.control))
        if options.control:
            _forget_webhooks(cluster.api)
        memory = stack.enter_context(_sampling(cluster))
        ordinary = stack.enter_context(_watching(cluster.api))
        _measure(ordinary, 0.1)  # The first pods take longer because of imports and new connections.
        before = _measure(ordinary, options.idle_minutes)
        with attacking(_target(cluster), options.only or sorted(ATTACKS)):
            load = _measure(ordinary, options.minutes)
        after = _measure(ordinary, options.idle_minutes)
    return _report([before, load, after], memory)


def _report(phases: Sequence[Mapping[str, Delays]], memory: Mapping[str, int]) -> int:
    print(f"{'phase':<18}{'pods':<8}{'bound':>6}{'lost':>6}{'median':>10}{'ratio':>7}{'p95':>10}{'ratio':>7}")
    slow = False
    for kind in _SPECS:
        before, load, after = (phase[kind] for phase in phases)
        median, p95 = min(before.median, after.median), min(before.p95, after.p95)
        for name, delays in ("at rest, before", before), ("under load", load), ("at rest, after", after):
            print(
                f"{name:<18}{kind:<8}{len(delays.seconds):>6}{delays.lost:>6}"
                f"{1000 * delays.median:>7.0f} ms{delays.median / median:>7.2f}"
                f"{1000 * delays.p95:>7.0f} ms{delays.p95 / p95:>7.2f}"
            )
        slow |= kind == "GPU" and (load.lost > 0 or load.median > 2 * median)
    over = False
    for name, file in _LIMITS.items():
        limit = memory_limit(MANIFESTS / "base" / file)
        over |= memory[name] > limit
        print(f"{name}: at most {memory[name] >> 20} MiB of a limit of {limit >> 20} MiB")
    return int(over or slow)


def memory_limit(manifest: Path) -> int:
    """Return the memory limit in bytes of the first container of the Deployment in this file."""
    documents = yaml.safe_load_all(manifest.read_text())
    deployment = next(d for d in documents if d and d["kind"] == "Deployment")
    return whole_bytes(deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"])


class Ordinary:
    """The ordinary tenant, which creates one pod at a time."""

    def __init__(self, api: Api) -> None:
        self._api, self._path = api, PODS.format("ordinary")
        self._bound: dict[str, threading.Event] = {}
        self._count = 0

    def see(self, pod: Mapping[str, Any]) -> None:
        event = self._bound.get(pod["metadata"]["name"])
        if event and pod["spec"].get("nodeName"):
            event.set()

    def delay(self, kind: str) -> float | None:
        """Create a pod, wait until it is bound, and delete it.

        Returns:
            The seconds until it was bound; None if it was not created, or not bound within `_GIVE_UP_SECONDS`.
        """
        self._count += 1
        name = f"p{self._count}"
        bound = self._bound[name] = threading.Event()
        began = time.perf_counter()
        try:
            self._api.create(self._path, {"metadata": {"name": name}, "spec": _SPECS[kind]})
        except (ApiError, Unreachable) as error:
            print(f"ordinary pod {name} was not created: {error}", flush=True)
            return None
        took = time.perf_counter() - began if bound.wait(_GIVE_UP_SECONDS) else None
        took = took if took is None else time.perf_counter() - began
        self._api.delete(f"{self._path}/{name}", {"gracePeriodSeconds": 0})
        del self._bound[name]
        return took


@contextmanager
def _watching(api: Api) -> Iterator[Ordinary]:
    ordinary = Ordinary(api)
    watch = Reflector(api, PODS.format("ordinary"), ordinary.see, lambda _: None)
    watch.start()
    watch.wait_synced(_GIVE_UP_SECONDS)
    try:
        yield ordinary
    finally:
        watch.stop()


def _measure(ordinary: Ordinary, minutes: float) -> dict[str, Delays]:
    """Create ordinary pods of each kind in turn, at most two a second, and return the delays of each kind."""
    end, found = time.monotonic() + 60 * minutes, {kind: list[float | None]() for kind in _SPECS}
    while time.monotonic() < end:
        for kind, delays in found.items():
            began = time.monotonic()
            delays.append(ordinary.delay(kind))
            time.sleep(max(0.0, _ORDINARY_SECONDS - (time.monotonic() - began)))
    return {kind: _delays(delays) for kind, delays in found.items()}


def _delays(found: Sequence[float | None]) -> Delays:
    seconds = tuple(delay for delay in found if delay is not None)
    return Delays(seconds or (_GIVE_UP_SECONDS,), len(found) - len(seconds))


def _target(cluster: Cluster) -> Target:
    webhook, scheduler = cluster.port("webhook"), cluster.port("scheduler")
    endpoints = ((webhook, "/mutate"), (webhook, "/validate"), (scheduler, "/bind-admission"))
    return Target(str(cluster.kubeconfig), endpoints)


@contextmanager
def _settings() -> Iterator[Path]:
    """Yield the path of settings in which 127.0.0.1, and not the attacker's address, is that of the API server."""
    blocks = {"apiServers": ["127.0.0.1/32"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mgpu.yaml"
        path.write_text(json.dumps({"webhook": blocks, "scheduler": blocks}))
        yield path


@contextmanager
def _kube_scheduler(binary: Path, cluster: Cluster, *, extender: bool) -> Iterator[None]:
    """Run a real kube-scheduler with the configuration of components/second-scheduler, but as `default-scheduler`."""
    file = MANIFESTS / "components" / "second-scheduler" / "kube-scheduler.yaml"
    documents = yaml.safe_load_all(file.read_text())
    config = next(d for d in documents if d and d["kind"] == "KubeSchedulerConfiguration")
    config["leaderElection"] = {"leaderElect": False}
    config["clientConnection"] = {"kubeconfig": str(cluster.kubeconfig_of("kube-scheduler")), "qps": 200, "burst": 400}
    config["profiles"][0]["schedulerName"] = "default-scheduler"
    for row in config["extenders"]:
        row["urlPrefix"] = cluster.extender_url
    config["extenders"] = config["extenders"] if extender else []
    path = cluster.folder / "kube-scheduler.json"
    path.write_text(json.dumps(config))
    command = [str(binary), f"--config={path}", "--secure-port=0"]
    with (cluster.logs / "kube-scheduler.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
            if process.poll() is not None:
                raise RuntimeError(f"kube-scheduler has ended; its log is {log.name}")
        finally:
            process.terminate()
            process.wait(30)


def _forget_webhooks(api: Api) -> None:
    for kind in ("mutating", "validating"):
        path = f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations"
        for item in api.get(path)["items"]:
            api.delete(f"{path}/{item['metadata']['name']}", {})
    time.sleep(2)  # The API server learns of the deletion from a watch, and nothing shows when it has.


@contextmanager
def _sampling(cluster: Cluster) -> Iterator[Mapping[str, int]]:
    """Yield the most memory of each process together with its children, in bytes. It is measured ten times a second."""
    most, stopped = dict.fromkeys(_LIMITS, 0), threading.Event()

    def sample() -> None:
        while not stopped.wait(0.1):
            for name in most:
                most[name] = max(most[name], _bytes_of(cluster.processes[name].pid))

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield most
    finally:
        stopped.set()
        thread.join()


def _bytes_of(pid: int) -> int:
    """Return the memory of a process and its children. A page that they share counts once, as for a memory limit."""
    total = 0
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            total += _bytes_of(int(child))
    return total


if __name__ == "__main__":
    sys.exit(main())
