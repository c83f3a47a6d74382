"""Simulates a container runtime. It runs nothing, and records which environment each container would have.

It reads CDI specs (Container Device Interface 0.6) in JSON as a real runtime does, and tells the node's simulated NVML
which processes run on which cards. `playground.kubelet` starts and ends containers in the `Runtime` of its node, and
`playground.cri` serves the `Runtime` to the node agent.
"""

import contextlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mgpu.model.quantities import QuantityError, parse_quantity
from playground import gpu_processes, nvml_state
from playground.cgroup_limits import make_cgroup

USES_MEMORY = "PLAYGROUND_USES_MEMORY"
"""The environment variable of a container that says how much memory of each of its cards its process uses: `6Gi`."""
USES_SM = "PLAYGROUND_USES_SM"
"""The environment variable that says how many percent of the SMs of each of its cards its process uses."""


_FIRST_PID = 1000


class Unresolvable(Exception):
    """Raised if no CDI spec contains a device that a container needs."""


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes that CDI devices make to a container. If two entries conflict, the later one counts.

    Attributes:
        env: The environment variables to set.
        nodes: The paths of the device nodes to add.
        mounts: The mounts to add, each as its path in the container and its path on the host.
    """

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


def resolve(names: Sequence[str], directory: Path) -> Edits:
    """Return the changes that CDI devices make to a container.

    As in the CDI library, a spec file is ignored if it cannot be read or is invalid, for example because one of its
    devices has no edits. The edits of a spec are applied once, before the edits of its devices.

    Args:
        names: The full names of the devices, such as `vendor/class=name`.
        directory: The directory of the CDI spec files.

    Raises:
        Unresolvable: Some devices are not found. The message contains the names of all of them.
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
    """Yield the valid CDI specs of a directory, sorted by file name."""
    for path in sorted(directory.glob("*.json")):
        try:
            spec = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(spec, dict) and spec.get("cdiVersion") and _complete(spec.get("devices")):
            yield spec


def _complete(devices: Sequence[dict[str, Any]] | None) -> bool:
    """Return whether there is at least one device, and every device has edits."""
    return bool(devices) and all(any((device.get("containerEdits") or {}).values()) for device in devices or ())


def _find(name: str, specs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the spec that contains a device and the device's entry in it, or (None, None)."""
    kind, _, device = name.partition("=")
    for spec in specs:
        for entry in spec["devices"] if spec.get("kind") == kind else ():
            if entry.get("name") == device:
                return spec, entry
    return None, None


def _apply(edits: Mapping[str, Any] | None, env: dict[str, str], nodes: list[str], mounts: dict[str, str]) -> None:
    """Add `containerEdits` to `env`, `nodes` and `mounts`."""
    for entry in (edits or {}).get("env") or ():
        key, _, value = entry.partition("=")
        env[key] = value
    nodes += (node["path"] for node in (edits or {}).get("deviceNodes") or ())
    mounts.update((mount["containerPath"], mount["hostPath"]) for mount in (edits or {}).get("mounts") or ())


class GpuClients:
    """Registers with the node's simulated NVML which processes run on which cards.

    Args:
        nvml: The state file of the simulated NVML (`playground.nvml_state`).
    """

    def __init__(self, nvml: Path) -> None:
        self._nvml = nvml

    def unknown(self, env: Mapping[str, str]) -> str:
        """Return the first MIG device in a container's environment that does not exist, or "" if all exist."""
        wanted = [uuid for uuid in _visible_devices(env) if uuid.startswith("MIG-")]
        modes = nvml_state.read_state(self._nvml).cards.values() if wanted else ()
        made = {compute.uuid for mode in modes for gpu in mode.instances for compute in gpu.compute}
        return next((uuid for uuid in wanted if uuid not in made), "")

    def start(self, pid: int, env: Mapping[str, str], cgroup: str) -> None:
        """Register a process on every device that `_visible_devices` finds in its environment.

        It uses as much of each as the variables `USES_MEMORY` and `USES_SM` say. An allocation that a limit forbids
        fails, and the process goes on without memory.

        Args:
            cgroup: The path of its cgroup below the root of all cgroups.
        """
        devices = _visible_devices(env)
        folder = nvml_state.cgroup_root(self._nvml) / cgroup.lstrip("/")
        if devices:
            gpu_processes.write_proc(self._nvml, pid, cgroup)
            folder.mkdir(parents=True, exist_ok=True)
            make_cgroup(nvml_state.cgroup_root(self._nvml), dmem=False)
            make_cgroup(folder)
        for uuid in devices:
            gpu_processes.use(self._nvml, uuid, pid, sm=_amount(env.get(USES_SM, "")), cgroup=folder)
            with contextlib.suppress(gpu_processes.OutOfMemory):
                gpu_processes.use(self._nvml, uuid, pid, memory=_amount(env.get(USES_MEMORY, "")))

    def end(self, pid: int, env: Mapping[str, str], cgroup: str) -> None:
        """Remove the process from the devices on which `start` registered it, and its cgroup."""
        for uuid in _visible_devices(env):
            nvml_state.deregister(self._nvml, uuid, pid)
        gpu_processes.remove_proc(self._nvml, pid)
        shutil.rmtree(nvml_state.cgroup_root(self._nvml) / cgroup.lstrip("/"), ignore_errors=True)

    def reboot(self) -> None:
        nvml_state.reboot(self._nvml)


def _amount(text: str) -> int:
    try:
        return int(parse_quantity(text)) if text else 0
    except QuantityError:
        return 0  # A program that cannot read its own variable uses nothing.


def _visible_devices(env: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of cards and MIG devices in NVIDIA_VISIBLE_DEVICES. The value `all` contains no UUID."""
    return [uuid for uuid in env.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if uuid.startswith(("GPU-", "MIG-"))]


Raw = Mapping[str, Any]


class CreateError(Exception):
    """Raised if a container cannot be created. The kubelet copies the message to the pod's status and its Events."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The merged answers of the device plugins, which the kubelet passes to the runtime with a container's spec.

    Attributes:
        env: The names and values of environment variables.
        cdi: The full names of CDI devices.
        nodes: The paths of device nodes.
        mounts: The mounts, each as its path in the container and its path on the host.
    """

    env: tuple[tuple[str, str], ...] = ()
    cdi: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """A container that runs or has ended. Times are in seconds since the epoch.

    Attributes:
        id: The ID of the container, as 64 hexadecimal digits.
        uid: The UID of its pod.
        namespace: The namespace of its pod.
        pod: The name of its pod.
        name: Its name in the pod's spec.
        attempt: How many containers of this name the pod had before.
        image: The image in the pod's spec.
        env: Its environment variables.
        nodes: The paths of the device nodes that it has.
        mounts: The mounts that it has, each as its path in the container and its path on the host.
        started: When it was started.
        exit_code: Its exit code, or None as long as it runs.
        finished: When it ended, or 0 as long as it runs.
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
        """The id of its process in the PID namespace of the node, in which the first ones belong to the system."""
        return _FIRST_PID + int(self.id, 16)

    @property
    def cgroup(self) -> str:
        """The path of its cgroup, as containerd names it with the driver `cgroupfs`."""
        return f"/kubepods/pod{self.uid}/{self.id}"


class Runtime:
    """Holds the containers of one node, even while the kubelet restarts. It is thread-safe.

    Args:
        cdi_dir: The directory of the CDI specs, which are read at each start of a container with CDI devices.
        gpus: The GpuClients that registers each container's process with the simulated NVML, or None if the node has no
            simulated NVML.
    """

    def __init__(self, cdi_dir: Path, gpus: GpuClients | None = None) -> None:
        self._cdi_dir = cdi_dir
        self._gpus = gpus
        self._lock = threading.Lock()  # guards `_numbers`, `_pods` and `_sandboxes`
        self._numbers = itertools.count(1)
        self._pods: dict[str, dict[str, Container]] = {}
        self._sandboxes: set[str] = set()

    def start(self, pod: Raw, container: Raw, options: RunOptions) -> Container:
        """Create and start a container.

        Its environment consists of the variables of the image, of the device plugins, of the pod's spec and of the CDI
        devices. A later source in this list overrides the earlier ones.

        Raises:
            CreateError: A CDI device, a file that a CDI device mounts, or a MIG device does not exist.
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
                self._gpus.start(record.pid, record.env, record.cgroup)
        return record

    def end(self, container: Container, exit_code: int = 0) -> None:
        """End a container unless it has already ended."""
        with self._lock:
            of_pod = self._pods[container.uid]
            if of_pod[container.id].running:
                of_pod[container.id] = replace(container, exit_code=exit_code, finished=time.time())
                if self._gpus:
                    self._gpus.end(container.pid, container.env, container.cgroup)

    def make_sandbox(self, uid: str) -> None:
        """Give the pod a sandbox, if it has none."""
        with self._lock:
            self._sandboxes.add(uid)

    def sandboxes(self) -> list[str]:
        """Return the UIDs of the pods that have a sandbox, sorted."""
        with self._lock:
            return sorted(self._sandboxes)

    def has_sandbox(self, uid: str) -> bool:
        """Return whether the pod has a sandbox. A pod gets one when its first container starts, if not before."""
        with self._lock:
            return uid in self._sandboxes

    def remove_sandbox(self, uid: str) -> None:
        """Remove the pod's sandbox. The pod gets a new one when its next container starts."""
        with self._lock:
            self._sandboxes.discard(uid)

    def containers(self, uid: str = "") -> tuple[Container, ...]:
        """Return the containers of the pod with this UID, or all containers if `uid` is empty.

        Containers that have ended are included. The containers are in the order in which they were started.
        """
        with self._lock:
            if uid:
                return tuple(self._pods.get(uid, {}).values())
            return tuple(sorted((c for of_pod in self._pods.values() for c in of_pod.values()), key=lambda c: c.id))

    def latest(self, uid: str, name: str) -> Container | None:
        """Return the pod's newest container of this name, or None if there was none."""
        return next((c for c in reversed(self.containers(uid)) if c.name == name), None)

    def reboot(self) -> None:
        """End every container and remove every sandbox, as a reboot of the node does."""
        for container in self.containers():
            self.end(container, 255)
            self.remove_sandbox(container.uid)
        if self._gpus:
            self._gpus.reboot()

    def logs(self, namespace: str, pod: str, container: str = "") -> str:
        """Return the log of a container: a line `KEY=VALUE` per variable, then a line `HOST → PATH` per mount.

        The log is that of the newest attempt. An empty `container` stands for the container of the pod that started
        first. Raises KeyError if the container has not started.
        """
        found = [c for c in self.containers() if (c.namespace, c.pod) == (namespace, pod) and container in ("", c.name)]
        if not found:
            raise KeyError(f'container "{container}" in pod "{pod}" is waiting to start')
        # Several pods may have had this name, one after the other. The newest one counts.
        of_pod = [c for c in found if c.uid == found[-1].uid]
        newest = [c for c in of_pod if c.name == (container or of_pod[0].name)][-1]
        lines = [f"{key}={value}" for key, value in sorted(newest.env.items())]
        return "".join(f"{line}\n" for line in [*lines, *(f"{at} → {to}" for to, at in newest.mounts)])


def image_environment(container: Raw) -> dict[str, str]:
    """Return the environment that the container's image sets.

    An image with `cuda` in its name requests every card from the NVIDIA runtime (docs/design/kubernetes.md).
    """
    return {"NVIDIA_VISIBLE_DEVICES": "all"} if "cuda" in container.get("image", "") else {}


def own_environment(pod: Raw, container: Raw) -> dict[str, str]:
    """Return the environment that the container's `env` sets.

    A `fieldRef` may refer to the pod's name, namespace, UID or node, or to one of its annotations. Any other
    `valueFrom` sets the variable to "".
    """
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
