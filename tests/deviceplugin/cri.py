"""A container runtime for tests, which serves the part of the CRI API that the agent calls."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from proto import cri_pb2 as api
from proto import cri_pb2_grpc

UID = "io.kubernetes.pod.uid"


class Cri(cri_pb2_grpc.RuntimeServiceServicer):
    """The service.

    Attributes:
        running: the UIDs of pods with a running container.
        ready: the UIDs of pods with a ready sandbox, between two containers.
        stopped: the containers that were stopped, with the timeout.
        failing: whether it refuses to stop containers.
        environments: pod UID → container → environment.
    """

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.ready: set[str] = set()
        self.stopped: list[tuple[str, int]] = []
        self.failing = False
        self.environments: dict[str, dict[str, dict[str, str]]] = {}

    def Version(self, request: Any, context: Any) -> api.VersionResponse:  # noqa: N802, ARG002
        return api.VersionResponse(runtime_name="cri-o", runtime_version="1.36.0")

    def ListContainers(self, request: Any, context: Any) -> api.ListContainersResponse:  # noqa: N802, ARG002
        uid = request.filter.label_selector[UID]
        if uid in self.environments:
            return api.ListContainersResponse(containers=[_running(uid, name) for name in self.environments[uid]])
        ended = api.Container(id="0", state=api.CONTAINER_EXITED)
        row = api.Container(id=f"of-{uid}", state=api.CONTAINER_RUNNING, labels={UID: uid})
        return api.ListContainersResponse(containers=[ended, *([row] if uid in self.running else [])])

    def ContainerStatus(self, request: Any, context: Any) -> api.ContainerStatusResponse:  # noqa: N802, ARG002
        uid, _, name = request.container_id.partition("/")
        env = [f"{key}={value}" for key, value in self.environments[uid][name].items()]
        return api.ContainerStatusResponse(info={"info": json.dumps({"runtimeSpec": {"process": {"env": env}}})})

    def StopContainer(self, request: Any, context: Any) -> api.StopContainerResponse:  # noqa: N802
        if self.failing:
            context.abort(grpc.StatusCode.UNKNOWN, "the shim does not answer")
        self.stopped.append((request.container_id, request.timeout))
        self.running.discard(request.container_id.removeprefix("of-"))
        return api.StopContainerResponse()

    def ListPodSandbox(self, request: Any, context: Any) -> api.ListPodSandboxResponse:  # noqa: N802, ARG002
        uid = request.filter.label_selector[UID]
        state = api.SANDBOX_READY if uid in self.ready | self.running else api.SANDBOX_NOTREADY
        return api.ListPodSandboxResponse(items=[api.PodSandbox(id="s", state=state)])


def _running(uid: str, name: str) -> api.Container:
    labels = {UID: uid, "io.kubernetes.container.name": name}
    return api.Container(id=f"{uid}/{name}", state=api.CONTAINER_RUNNING, labels=labels)


@contextmanager
def serving(socket: Path) -> Iterator[Cri]:
    server, cri = grpc.server(ThreadPoolExecutor(2)), Cri()
    cri_pb2_grpc.add_RuntimeServiceServicer_to_server(cri, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield cri
    finally:
        server.stop(None).wait()
