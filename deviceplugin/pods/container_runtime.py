"""The client of the node's container runtime (CRI).

`deviceplugin.pods.remnants` asks whether a deleted pod still runs and stops its containers;
`deviceplugin.pods.unrecorded_pods` asks for the environment of containers that nothing else knows the cards of; the
agent asks for `mgpu doctor` whether the runtime applies CDI specs. All calls have deadlines. A runtime that is absent
or silent raises RetryLater and never means "no".
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
"""containerd reports UNKNOWN for a container that it could not load after its own restart: it may run."""
_HAS_RUN = (*_MAY_RUN, api.CONTAINER_EXITED)
_VISIBLE, _MOUNTED = "NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices/"
_NO_CARDS = ("", "none", "void")
_NODE = re.compile(r"/dev/nvidia(\d+)", re.ASCII)
_UID, _NAME = "io.kubernetes.pod.uid", "io.kubernetes.container.name"


class ContainerRuntime:
    """Used on one event loop; `has_cdi` from any thread.

    Args:
        socket: CRI's. Where it is None or does not exist, every call raises RetryLater.

    Attributes:
        has_cdi: whether the runtime applies CDI specs, by the last answer (`follow`); None: not known.
    """

    def __init__(self, socket: Path | None) -> None:
        self._socket = socket
        self._channel: Any = None
        self.has_cdi: bool | None = None

    async def follow(self, changed: Callable[[], None]) -> None:
        """Keep `has_cdi` current, since the runtime's configuration may change. Runs until cancelled.

        Args:
            changed: is called when `has_cdi` has changed.
        """
        while True:
            try:
                found = await self.query_cdi()
            except RetryLater as error:
                log.debug("whether the runtime has CDI is not known: %s", error)
                found = None
            if found != self.has_cdi:
                self.has_cdi = found
                changed()
            await asyncio.sleep(_CDI_POLL_SECONDS)

    async def environments(self, uid: str) -> dict[str, Mapping[str, str]]:
        """Return container → environment of the pod's containers that run, or else have run. Raises RetryLater.

        Where a container has cards by mounts or device nodes, `NVIDIA_VISIBLE_DEVICES` names them: UUIDs or `minor:0`.

        Args:
            uid: the kubelet's.
        """
        stub = self._stub()
        asked = api.ListContainersRequest(filter=api.ContainerFilter(label_selector={_UID: uid}))
        try:
            listed = await stub.ListContainers(asked, timeout=_QUERY_SECONDS)
            found: dict[str, Mapping[str, str]] = {}
            # The kubelet keeps the last instance of a container, which may start again on the cards that it had.
            for row in sorted(listed.containers, key=lambda row: row.state != api.CONTAINER_RUNNING):
                if row.state in _HAS_RUN and row.labels.get(_NAME, "") not in found:
                    request = api.ContainerStatusRequest(container_id=row.id, verbose=True)
                    status = await stub.ContainerStatus(request, timeout=_QUERY_SECONDS)
                    found[row.labels.get(_NAME, "")] = _environment(status.info)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return found

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        """Return whether a container of the pod runs; with `sandbox` also, whether one may still be started.

        The kubelet starts containers in a sandbox that is ready alone, and stops it once the pod has ended.

        Args:
            uid: the kubelet's. The kubelet sets it as a label over what the pod's author writes.
        """
        stub, label = self._stub(), {_UID: uid}
        try:
            listed = await stub.ListContainers(
                api.ListContainersRequest(filter=api.ContainerFilter(label_selector=label)), timeout=_QUERY_SECONDS
            )
            if any(row.state in _MAY_RUN for row in listed.containers):
                return True
            if not sandbox:
                return False
            asked = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(label_selector=label))
            sandboxes = await stub.ListPodSandbox(asked, timeout=_QUERY_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return any(row.state == api.SANDBOX_READY for row in sandboxes.items)

    async def stop_containers(self, uid: str) -> int:
        """Kill the containers of the pod that run, and return how many. Raises RetryLater.

        SIGKILL is sent at once: a signal with a grace period would wait behind the kubelet's own call, which waits for
        the grace period of the deletion.

        Args:
            uid: the kubelet's. A container whose own label names another pod is left alone, whatever the runtime lists.
        """
        stub, label = self._stub(), {_UID: uid}
        asked = api.ListContainersRequest(filter=api.ContainerFilter(label_selector=label))
        try:
            listed = await stub.ListContainers(asked, timeout=_QUERY_SECONDS)
            ids = [row.id for row in listed.containers if row.state in _MAY_RUN and row.labels.get(_UID) == uid]
            for container in ids:
                request = api.StopContainerRequest(container_id=container, timeout=0)
                await stub.StopContainer(request, timeout=_STOP_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _as_retry_later(error) from error
        return len(ids)

    async def query_cdi(self) -> bool | None:
        """Return whether the runtime applies CDI specs; None: it does not say. Raises RetryLater.

        containerd reports its configuration (`enableCDI`; off by default before 2.0). CRI-O always applies them.
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

    def _stub(self) -> Any:
        if self._socket is None or not self._socket.exists():
            raise RetryLater(f"there is no container runtime at {self._socket}")
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        return cri_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def _as_retry_later(error: grpc.aio.AioRpcError) -> RetryLater:
    return RetryLater(f"container runtime: {error.code().name}: {error.details()}")


def _environment(info: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container. Raises RetryLater where the runtime reports it in another form."""
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
    """Yield the cards that are mounted by their UUIDs: NVIDIA's container toolkit looks there before the variable."""
    targets = (str(mount["destination"]) for mount in spec.get("mounts") or ())
    yield from (target.removeprefix(_MOUNTED) for target in targets if target.startswith(_MOUNTED))


def _cards_of_device_nodes(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cards of which the container has the device nodes, as CDI of NVIDIA's plugin gives it."""
    found = (_NODE.fullmatch(str(node["path"])) for node in (spec.get("linux") or {}).get("devices") or ())
    yield from (f"minor:{match[1]}" for match in found if match)


def _cdi_setting(info: Mapping[str, str]) -> bool | None:
    try:
        found = orjson.loads(info["config"])["enableCDI"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, bool) else None
