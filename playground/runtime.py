"""A container runtime that runs nothing and remembers everything: each container's environment, as it would see it."""

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playground import cdi
from playground.gpu_clients import GpuClients

Raw = Mapping[str, Any]


class CreateError(Exception):
    """The container could not be created; the message is what `kubectl describe pod` shows."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the kubelet hands over beside the container's own spec: the device plugins' answers, in its order."""

    env: tuple[tuple[str, str], ...] = ()
    cdi: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """One container, running or ended (`exit_code`). Times are seconds since the epoch.

    mounts: (path in the container, path on the host).
    """

    id: str
    uid: str
    namespace: str
    pod: str
    name: str
    attempt: int
    image: str
    env: Mapping[str, str]
    nodes: tuple[str, ...]
    mounts: tuple[tuple[str, str], ...]
    started: float
    exit_code: int | None = None
    finished: float = 0.0

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def pid(self) -> int:
        """As the node sees it."""
        return int(self.id, 16)


class Runtime:
    """The containers of one node; it survives its kubelet. Thread-safe.

    cdi_dir: where CDI specs are read, anew for every container. gpus: told of what runs on which cards, if anybody is.
    """

    def __init__(self, cdi_dir: Path, gpus: GpuClients | None = None) -> None:
        self._cdi_dir, self._gpus = cdi_dir, gpus
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pods: dict[str, dict[str, Container]] = {}
        self._sandboxes: set[str] = set()

    def start(self, pod: Raw, container: Raw, options: RunOptions) -> Container:
        """Create and start. The environment, later over earlier: image, device plugins, the pod's own, CDI.

        Raises CreateError where a CDI device, what it mounts, or a MIG device is not there.
        """
        meta = pod["metadata"]
        try:
            edits = cdi.resolve(options.cdi, self._cdi_dir)
        except cdi.Unresolvable as error:
            raise CreateError(f"failed to inject CDI devices: {error}") from error
        for _, host in edits.mounts:
            if not Path(host).exists():
                raise CreateError(f"failed to create mount: {host}: no such file or directory")
        own = own_environment(pod, container)
        env = {**image_environment(container), **dict(options.env), **own, **edits.env}
        if self._gpus and (missing := self._gpus.unknown(env)):
            raise CreateError(f"nvidia-container-cli: device error: {missing}: unknown device")
        with self._lock:
            of_pod = self._pods.setdefault(meta["uid"], {})
            record = Container(
                id=f"{next(self._numbers):064x}",
                uid=meta["uid"],
                namespace=meta["namespace"],
                pod=meta["name"],
                name=container["name"],
                attempt=sum(c.name == container["name"] for c in of_pod.values()),
                image=container.get("image", ""),
                env=env,
                nodes=(*options.nodes, *edits.nodes),
                mounts=tuple({**dict(options.mounts), **dict(edits.mounts)}.items()),
                started=time.time(),
            )
            of_pod[record.id] = record
            self._sandboxes.add(record.uid)
            if self._gpus:
                self._gpus.start(record.pid, record.env)
        return record

    def end(self, container: Container, exit_code: int = 0) -> None:
        """The container's process ends; a second end changes nothing."""
        with self._lock:
            of_pod = self._pods[container.uid]
            if of_pod[container.id].running:
                of_pod[container.id] = replace(container, exit_code=exit_code, finished=time.time())
                if self._gpus:
                    self._gpus.end(container.pid, container.env)

    def has_sandbox(self, uid: str) -> bool:
        """Return whether the pod has a sandbox, in which its next container can start."""
        with self._lock:
            return uid in self._sandboxes

    def remove_sandbox(self, uid: str) -> None:
        """No container of the pod starts any more."""
        with self._lock:
            self._sandboxes.discard(uid)

    def containers(self, uid: str = "") -> tuple[Container, ...]:
        """Every container there ever was, or all of one pod, in the order of their start."""
        with self._lock:
            if uid:
                return tuple(self._pods.get(uid, {}).values())
            return tuple(sorted((c for of_pod in self._pods.values() for c in of_pod.values()), key=lambda c: c.id))

    def latest(self, uid: str, name: str) -> Container | None:
        """The last attempt of a container."""
        return next((c for c in reversed(self.containers(uid)) if c.name == name), None)

    def reboot(self) -> None:
        """The node went down: whatever ran is gone."""
        for container in self.containers():
            self.end(container, 255)
            self.remove_sandbox(container.uid)
        if self._gpus:
            self._gpus.reboot()

    def logs(self, namespace: str, pod: str, container: str = "") -> str:
        """The environment of a pod's newest container as `KEY=VALUE` lines, then its mounts (`host → container`).

        container "": the pod's first one. Raises KeyError where there is none (yet).
        """
        found = [c for c in self.containers() if (c.namespace, c.pod) == (namespace, pod) and container in ("", c.name)]
        if not found:
            raise KeyError(f'container "{container}" in pod "{pod}" is waiting to start')
        # Of a pod that was created anew under the same name, the newest.
        of_pod = [c for c in found if c.uid == found[-1].uid]
        newest = [c for c in of_pod if c.name == (container or of_pod[0].name)][-1]
        lines = [f"{key}={value}" for key, value in sorted(newest.env.items())]
        return "".join(f"{line}\n" for line in [*lines, *(f"{at} → {to}" for to, at in newest.mounts)])


def image_environment(container: Raw) -> dict[str, str]:
    """What the image itself sets: CUDA images ask the NVIDIA runtime for every card (kubernetes.md)."""
    return {"NVIDIA_VISIBLE_DEVICES": "all"} if "cuda" in container.get("image", "") else {}


def own_environment(pod: Raw, container: Raw) -> dict[str, str]:
    """The container's `env`: values and the fieldRefs of name, namespace, uid, node and annotations."""
    meta = pod["metadata"]
    fields = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        **{f"metadata.annotations['{key}']": value for key, value in (meta.get("annotations") or {}).items()},
    }
    env = {}
    for entry in container.get("env") or ():
        path = ((entry.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        env[entry["name"]] = fields.get(path, "") if path else entry.get("value") or ""
    return env
