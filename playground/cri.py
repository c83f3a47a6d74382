"""The CRI service of a node's container runtime, with the methods that the node agent calls.

`cluster` and the tests start the service, one for each node. When the agent calls another method, add it here.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import orjson

from playground.container_runtime import Container, Runtime
from proto import cri_pb2 as api
from proto import cri_pb2_grpc as services

UID, NAME = "io.kubernetes.pod.uid", "io.kubernetes.container.name"
_EVENT_SECONDS = 0.05
_KILLED = 137  # the exit code of a process that SIGKILL has ended


class Cri(services.RuntimeServiceServicer):
    """Serves the containers of `runtime` on the Unix socket `socket`, and reports containerd as the runtime's name.

    The service also runs while the kubelet is stopped.
    """

    def __init__(self, socket: Path, runtime: Runtime) -> None:
        self._socket = socket
        self._runtime = runtime
        self._server: Any = None
        self._stopped = Event()

    def start(self) -> None:
        self._stopped.clear()
        self._server = grpc.server(ThreadPoolExecutor(4, "cri"), options=[("grpc.so_reuseport", 0)])
        services.add_RuntimeServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.stop(None).wait()

    def Version(self, request: Any, context: Any) -> api.VersionResponse:  # noqa: N802, ARG002
        return api.VersionResponse(runtime_name="containerd", runtime_version="2.0.0")

    def Status(self, request: Any, context: Any) -> api.StatusResponse:  # noqa: N802, ARG002
        return api.StatusResponse(info={"config": '{"enableCDI": true}'} if request.verbose else {})

    def ListContainers(self, request: Any, context: Any) -> api.ListContainersResponse:  # noqa: N802, ARG002
        rows = self._runtime.containers(request.filter.label_selector.get(UID, ""))
        return api.ListContainersResponse(containers=map(_row, rows))

    def ListPodSandbox(self, request: Any, context: Any) -> api.ListPodSandboxResponse:  # noqa: N802, ARG002
        wanted = request.filter.label_selector.get(UID, "")
        uids = [uid for uid in self._runtime.sandboxes() if wanted in ("", uid)]
        rows = [api.PodSandbox(id=uid, state=api.SANDBOX_READY, labels={UID: uid}) for uid in uids]
        return api.ListPodSandboxResponse(items=rows)

    def ContainerStatus(self, request: Any, context: Any) -> api.ContainerStatusResponse:  # noqa: N802
        found = self._find(request.container_id, context)
        spec = {
            "process": {"env": [f"{key}={value}" for key, value in found.env.items()]},
            "linux": {"cgroupsPath": found.cgroup},
        }
        info = orjson.dumps({"runtimeSpec": spec}).decode()
        return api.ContainerStatusResponse(info={"info": info} if request.verbose else {})

    def StopContainer(self, request: Any, context: Any) -> api.StopContainerResponse:  # noqa: N802
        self._runtime.end(self._find(request.container_id, context), _KILLED)
        return api.StopContainerResponse()

    def GetContainerEvents(self, request: Any, context: Any) -> Iterator[api.ContainerEventResponse]:  # noqa: N802, ARG002
        """Yield an event for each container that starts after the call, until the client goes or the service ends."""
        known = {container.id for container in self._runtime.containers()}
        while context.is_active() and not self._stopped.wait(_EVENT_SECONDS):
            running = {container.id for container in self._runtime.containers() if container.running}
            for id_ in sorted(running - known):
                started = api.CONTAINER_STARTED_EVENT
                yield api.ContainerEventResponse(container_id=id_, container_event_type=started)
            known |= running

    def _find(self, wanted: str, context: Any) -> Container:
        found = next((c for c in self._runtime.containers() if c.id == wanted), None)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"container {wanted} not found")
            raise AssertionError("abort does not return")
        return found


def _row(container: Container) -> api.Container:
    state = api.CONTAINER_RUNNING if container.running else api.CONTAINER_EXITED
    return api.Container(id=container.id, state=state, labels={UID: container.uid, NAME: container.name})
