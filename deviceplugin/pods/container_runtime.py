"""The client of the node's container runtime (CRI).

`pods.remnants` asks whether a deleted pod still runs, and stops its containers. `pods.unrecorded_pods` reads the
environments of containers, `usage.usage_reader` asks for the names of containers, `dra.claim_cleanup` asks which pods
run, and `deviceplugin.agent` runs `follow`, which asks whether the runtime has CDI. All queries have deadlines. If the
runtime is absent or does not answer, they raise RetryLater; callers must not take this for a negative answer.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import orjson

from mgpu.model.errors import RetryLater
from proto import cri_pb2 as api
from proto import cri_pb2_grpc

log = logging.getLogger(__name__)

_QUERY_SECONDS = 2.0
_STOP_SECONDS = 10.0
_CDI_POLL_SECONDS = 60.0
_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_http_proxy", 0)]
_CRIO = "cri-o"
_MAY_RUN = (api.CONTAINER_RUNNING, api.CONTAINER_UNKNOWN)
"""The states of containers that may run. containerd reports UNKNOWN for a container that it could not load after its
own restart."""
_HAS_RUN = (*_MAY_RUN, api.CONTAINER_EXITED)
_VISIBLE, _MOUNTED = "NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices/"
_NO_CARDS = ("", "none", "void")
_NODE = re.compile(r"/dev/nvidia(\d+)", re.ASCII)
_UID, _NAME = "io.kubernetes.pod.uid", "io.kubernetes.container.name"


class RunningRow(NamedTuple):
    """A container that runs.

    Attributes:
        uid: The UID by which the kubelet knows its pod.
        name: Its name in the pod.
    """

    id: str
    uid: str
    name: str


class ContainerRuntime:
    """A client of the CRI API. Use it on one event loop; any thread may read `has_cdi`.

    The methods identify a pod by the UID by which the kubelet knows it. For a static pod, this is not the UID of its
    mirror pod in the API.

    Args:
        socket: The CRI socket. If it is None or does not exist, every query raises RetryLater.

    Attributes:
        has_cdi: Whether the runtime applies CDI specs; None if it did not answer the last query, or if its answer does
            not contain this setting. `follow` sets this attribute.
    """

    def __init__(self, socket: Path | None) -> None:
        self._socket = socket
        self._channel: Any = None
        self.has_cdi: bool | None = None

    async def follow(self, changed: Callable[[], None]) -> None:
        """Ask once a minute whether the runtime applies CDI specs, and set `has_cdi`, until cancelled."""
        while True:
            try:
                found = await self.query_cdi()
            except RetryLater as error:
                log.debug("cannot find out whether the runtime has CDI: %s", error)
                found = None
            if found != self.has_cdi:
                self.has_cdi = found
                changed()
            await asyncio.sleep(_CDI_POLL_SECONDS)

    async def environments(self, uid: str) -> dict[str, Mapping[str, str]]:
        """Return the environments of the pod's containers that run or have run, by container. Raises RetryLater.

        If a container got its cards as mounts, `NVIDIA_VISIBLE_DEVICES` in the result contains their UUIDs. If it got
        them as device nodes and the variable names no cards, the variable has the form `minor:0` in the result.
        """
        stub = self._stub()
        found: dict[str, Mapping[str, str]] = {}
        try:
            rows = await self._list_containers(stub, uid)
            # A container that has exited counts too if no instance of it runs, because the kubelet may restart it, and
            # then it has the same cards again.
            for row in sorted(rows, key=lambda row: row.state != api.CONTAINER_RUNNING):
                if row.state in _HAS_RUN and row.labels.get(_NAME, "") not in found:
                    request = api.ContainerStatusRequest(container_id=row.id, verbose=True)
                    status = await stub.ContainerStatus(request, timeout=_QUERY_SECONDS)
                    found[row.labels.get(_NAME, "")] = _environment(status.info)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return found

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        """Return whether a container of the pod runs or may run (`_MAY_RUN`). Raises RetryLater.

        Args:
            uid: The UID, which is a label in the runtime. Pods cannot forge the label, since the kubelet overwrites it.
            sandbox: Whether to return True also if the sandbox of the pod is ready. The kubelet starts containers only
                in a ready sandbox, and stops the sandbox once the pod has ended.
        """
        stub = self._stub()
        try:
            if any(row.state in _MAY_RUN for row in await self._list_containers(stub, uid)):
                return True
            if not sandbox:
                return False
            request = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(label_selector={_UID: uid}))
            sandboxes = await stub.ListPodSandbox(request, timeout=_QUERY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return any(row.state == api.SANDBOX_READY for row in sandboxes.items)

    async def live_pods(self) -> frozenset[str]:
        """Return the UIDs of the pods of which a container may run, or may still start (`is_running`).

        Raises RetryLater. Containers and sandboxes that are not the kubelet's have no UID, and are left out.
        """
        stub = self._stub()
        try:
            containers = await stub.ListContainers(api.ListContainersRequest(), timeout=_QUERY_SECONDS)
            sandboxes = await stub.ListPodSandbox(api.ListPodSandboxRequest(), timeout=_QUERY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        rows = [row for row in containers.containers if row.state in _MAY_RUN]
        rows += [row for row in sandboxes.items if row.state == api.SANDBOX_READY]
        return frozenset(uid for row in rows if (uid := row.labels.get(_UID, "")))

    async def stop_containers(self, uid: str) -> int:
        """Kill the running containers of the pod, and return their number. Raises RetryLater.

        The runtime sends SIGKILL at once. With a grace period the call would wait for the kubelet's own call, which
        lasts for the grace period of the deletion.
        """
        stub = self._stub()
        try:
            rows = await self._list_containers(stub, uid)
            ids = [row.id for row in rows if row.state in _MAY_RUN and row.labels.get(_UID) == uid]
            for container in ids:
                request = api.StopContainerRequest(container_id=container, timeout=0)
                await stub.StopContainer(request, timeout=_STOP_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return len(ids)

    async def query_cdi(self) -> bool | None:
        """Return whether the runtime applies CDI specs, or None if it does not report that. Raises RetryLater.

        containerd reports `enableCDI` in its configuration (off by default before 2.0). CRI-O always applies CDI specs.
        """
        stub = self._stub()
        try:
            version = await stub.Version(api.VersionRequest(version="v1"), timeout=_QUERY_SECONDS)
            if version.runtime_name == _CRIO:
                return True
            status = await stub.Status(api.StatusRequest(verbose=True), timeout=_QUERY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return _cdi_setting(status.info)

    async def running_containers(self) -> list[RunningRow]:
        """Return the running containers of all pods, by ID. Raises RetryLater."""
        stub = self._stub()
        try:
            answer = await stub.ListContainers(api.ListContainersRequest(), timeout=_QUERY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        rows = [row for row in answer.containers if row.state == api.CONTAINER_RUNNING]
        found = (RunningRow(row.id, row.labels.get(_UID, ""), row.labels.get(_NAME, "")) for row in rows)
        return sorted(found)

    async def cgroup_path(self, container: str) -> str:
        """Return the field `linux.cgroupsPath` of the container's OCI spec; "" if it has none. Raises RetryLater."""
        stub = self._stub()
        try:
            request = api.ContainerStatusRequest(container_id=container, verbose=True)
            status = await stub.ContainerStatus(request, timeout=_QUERY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return _cgroup_path(status.info)

    async def events(self) -> AsyncIterator[str]:
        """Yield the ID of each container when it starts, until the stream ends. Raises RetryLater.

        A runtime that does not announce containers raises it too.
        """
        try:
            async for event in self._stub().GetContainerEvents(api.GetEventsRequest()):
                if event.container_event_type == api.CONTAINER_STARTED_EVENT:
                    yield event.container_id
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error

    def _stub(self) -> Any:
        if self._socket is None or not self._socket.exists():
            raise RetryLater(f"there is no container runtime at {self._socket}")
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        return cri_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def _list_containers(self, stub: Any, uid: str) -> Sequence[Any]:
        request = api.ListContainersRequest(filter=api.ContainerFilter(label_selector={_UID: uid}))
        answer = await stub.ListContainers(request, timeout=_QUERY_SECONDS)
        containers: Sequence[Any] = answer.containers
        return containers

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def _as_retry_later(error: grpc.aio.AioRpcError) -> RetryLater:
    return RetryLater(f"container runtime: {error.code().name}: {error.details()}")


def _environment(info: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container. Raises RetryLater if the runtime reports it in an unknown form."""
    try:
        spec = orjson.loads(info["info"])["runtimeSpec"]
        lines: list[str] = spec["process"]["env"]
        env = dict(line.split("=", 1) for line in lines if "=" in line)
        visible = [*_mounted_cards(spec)]
        if not visible and env.get(_VISIBLE, "") in _NO_CARDS:
            visible = [*_cards_of_device_nodes(spec)]
        return {**env, _VISIBLE: ",".join(visible)} if visible else env
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetryLater(f"container runtime: the environment of a container is not readable: {error!r}") from error


def _mounted_cards(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the UUIDs of the cards that are mounted. NVIDIA's container toolkit prefers mounts to the variable."""
    targets = (str(mount["destination"]) for mount in spec.get("mounts") or ())
    yield from (target.removeprefix(_MOUNTED) for target in targets if target.startswith(_MOUNTED))


def _cards_of_device_nodes(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cards whose device nodes the container has, in the form `minor:0`.

    The CDI specs of NVIDIA's plugin add device nodes.
    """
    found = (_NODE.fullmatch(str(node["path"])) for node in (spec.get("linux") or {}).get("devices") or ())
    yield from (f"minor:{match[1]}" for match in found if match)


def _cdi_setting(info: Mapping[str, str]) -> bool | None:
    try:
        found = orjson.loads(info["config"])["enableCDI"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, bool) else None


def _cgroup_path(info: Mapping[str, str]) -> str:
    try:
        return str(orjson.loads(info["info"])["runtimeSpec"]["linux"]["cgroupsPath"])
    except (ValueError, KeyError, TypeError):
        return ""
