"""A container runtime that runs nothing and records, for each container, the environment that it would have.

It includes the part of a runtime that reads CDI specs (Container Device Interface 0.6), and tells the node's simulated
NVML which processes run on which cards. The kubelet starts containers through it; tests and the demo read them.
"""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from playground import nvml_state


class Unresolvable(Exception):
    """No CDI spec names the device, so the container is not created."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What CDI devices change in a container; the later of two conflicting entries wins.

    mounts: (path in the container, path on the host).
    """

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


def resolve(names: Sequence[str], directory: Path) -> Edits:
    """Return the edits of all devices in `names` (`vendor/class=name`) from the spec files in `directory`.

    As in the CDI library, a file is ignored that cannot be read or parsed, or has a device without edits. The edits of
    a spec are applied once, before those of its devices. Raises Unresolvable with every name that is not found.
    """
    specs = list(_specs(directory)) if names else []
    env: dict[str, str] = {}
    nodes: list[str] = []
    mounts: dict[str, str] = {}
    missing: list[str] = []
    used: list[dict[str, Any]] = []
    for name in names:
        spec, device = _find(name, specs)
        if spec is None or device is None:
            missing.append(name)
            continue
        if not any(spec is seen for seen in used):
            used.append(spec)
            _apply(spec.get("containerEdits"), env, nodes, mounts)
        _apply(device.get("containerEdits"), env, nodes, mounts)
    if missing:
        raise Unresolvable(f"unresolvable CDI devices {', '.join(missing)}")
    return Edits(env, tuple(nodes), tuple(mounts.items()))


def _specs(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("*.json")):
        try:
            spec = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(spec, dict) and spec.get("cdiVersion") and _complete(spec.get("devices")):
            yield spec


def _complete(devices: Sequence[dict[str, Any]] | None) -> bool:
    """Return whether there are devices, each of which changes something in a container."""
    return bool(devices) and all(any((device.get("containerEdits") or {}).values()) for device in devices or ())


def _find(name: str, specs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    kind, _, device = name.partition("=")
    for spec in specs:
        for entry in spec["devices"] if spec.get("kind") == kind else ():
            if entry.get("name") == device:
                return spec, entry
    return None, None


def _apply(edits: Mapping[str, Any] | None, env: dict[str, str], nodes: list[str], mounts: dict[str, str]) -> None:
    for entry in (edits or {}).get("env") or ():
        key, _, value = entry.partition("=")
        env[key] = value
    nodes += (node["path"] for node in (edits or {}).get("deviceNodes") or ())
    mounts.update((mount["containerPath"], mount["hostPath"]) for mount in (edits or {}).get("mounts") or ())


class GpuClients:
    """Keeps the node's simulated NVML informed about what runs on its cards.

    nvml: the state file of that NVML (`playground.nvml_state`).
    """

    def __init__(self, nvml: Path) -> None:
        self._nvml = nvml

    def unknown(self, env: Mapping[str, str]) -> str:
        """Return a MIG device in a container's environment that does not exist, "" where all exist."""
        wanted = [uuid for uuid in _visible_devices(env) if uuid.startswith("MIG-")]
        modes = nvml_state.read_state(self._nvml).cards.values() if wanted else ()
        made = {compute.uuid for mode in modes for gpu in mode.instances for compute in gpu.compute}
        return next((uuid for uuid in wanted if uuid not in made), "")

    def start(self, pid: int, env: Mapping[str, str]) -> None:
        for uuid in _visible_devices(env):
            nvml_state.register(self._nvml, uuid, pid)

    def end(self, pid: int, env: Mapping[str, str]) -> None:
        for uuid in _visible_devices(env):
            nvml_state.deregister(self._nvml, uuid, pid)

    def reboot(self) -> None:
        nvml_state.reboot(self._nvml)


def _visible_devices(env: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of cards and MIG devices in a container's environment."""
    return [uuid for uuid in env.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if uuid.startswith(("GPU-", "MIG-"))]


Raw = Mapping[str, Any]


class CreateError(Exception):
    """The container could not be created. `kubectl describe pod` shows the message."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The merged answers of the device plugins, which the kubelet passes on with a container's own spec."""

    env: tuple[tuple[str, str], ...] = ()
    cdi: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """One container, running or, with an `exit_code`, ended. Times are seconds since the epoch.

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
    """The containers of one node. Thread-safe. It outlives a restart of the kubelet.

    cdi_dir: where CDI specs are read for every start of a container.
    gpus: informed about what runs on which cards; None without simulated NVML.
    """

    def __init__(self, cdi_dir: Path, gpus: GpuClients | None = None) -> None:
        self._cdi_dir = cdi_dir
        self._gpus = gpus
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pods: dict[str, dict[str, Container]] = {}
        self._sandboxes: set[str] = set()

    def start(self, pod: Raw, container: Raw, options: RunOptions) -> Container:
        """Create and start a container.

        Its environment is that of the image, overridden by the device plugins', the pod's own and CDI's, in this order.
        Raises CreateError where a CDI device, a file that it mounts, or a MIG device is missing.
        """
        meta = pod["metadata"]
        try:
            edits = resolve(options.cdi, self._cdi_dir)
        except Unresolvable as error:
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
        """End a container. Ending it again changes nothing."""
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
        """Remove the pod's sandbox, without which no container of it starts."""
        with self._lock:
            self._sandboxes.discard(uid)

    def containers(self, uid: str = "") -> tuple[Container, ...]:
        """Return all containers, also ended ones, or those of one pod, in the order of their start."""
        with self._lock:
            if uid:
                return tuple(self._pods.get(uid, {}).values())
            return tuple(sorted((c for of_pod in self._pods.values() for c in of_pod.values()), key=lambda c: c.id))

    def latest(self, uid: str, name: str) -> Container | None:
        """Return the last attempt of a container."""
        return next((c for c in reversed(self.containers(uid)) if c.name == name), None)

    def reboot(self) -> None:
        """End everything, as a reboot of the node does."""
        for container in self.containers():
            self.end(container, 255)
            self.remove_sandbox(container.uid)
        if self._gpus:
            self._gpus.reboot()

    def logs(self, namespace: str, pod: str, container: str = "") -> str:
        """Return a container's log: its environment as `KEY=VALUE` lines, then its mounts (`host → container`).

        It is that of the newest attempt; without `container`, of the pod's first container. Raises KeyError before the
        container has started.
        """
        found = [c for c in self.containers() if (c.namespace, c.pod) == (namespace, pod) and container in ("", c.name)]
        if not found:
            raise KeyError(f'container "{container}" in pod "{pod}" is waiting to start')
        # The newest of several pods that had the name one after the other.
        of_pod = [c for c in found if c.uid == found[-1].uid]
        newest = [c for c in of_pod if c.name == (container or of_pod[0].name)][-1]
        lines = [f"{key}={value}" for key, value in sorted(newest.env.items())]
        return "".join(f"{line}\n" for line in [*lines, *(f"{at} → {to}" for to, at in newest.mounts)])


def image_environment(container: Raw) -> dict[str, str]:
    """Return the image's environment: CUDA images ask the NVIDIA runtime for every card (docs/design/kubernetes.md)."""
    return {"NVIDIA_VISIBLE_DEVICES": "all"} if "cuda" in container.get("image", "") else {}


def own_environment(pod: Raw, container: Raw) -> dict[str, str]:
    """Return the container's `env`: values, and fieldRefs of name, namespace, uid, node and annotations."""
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
