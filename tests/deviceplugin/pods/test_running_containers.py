"""What the client of the container runtime says of running containers, their cgroups, and the events of starts."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.isolation.driver.containers import Containers, RunningContainer
from deviceplugin.pods.container_runtime import ContainerRuntime, RunningRow
from mgpu.model.errors import RetryLater
from proto import cri_pb2 as api
from proto import cri_pb2_grpc

UID, NAME = "io.kubernetes.pod.uid", "io.kubernetes.container.name"


class Cri(cri_pb2_grpc.RuntimeServiceServicer):
    """A runtime with a running container of two pods, and an ended one."""

    announces = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ListContainers(self, request: Any, context: Any) -> api.ListContainersResponse:  # noqa: N802, ARG002
        states = {"b": api.CONTAINER_RUNNING, "a": api.CONTAINER_RUNNING, "x": api.CONTAINER_EXITED}
        labels = {id_: {UID: f"uid-{id_}", NAME: "c"} for id_ in states}
        rows = [api.Container(id=id_, state=state, labels=labels[id_]) for id_, state in states.items()]
        return api.ListContainersResponse(containers=rows)

    def ContainerStatus(self, request: Any, context: Any) -> api.ContainerStatusResponse:  # noqa: N802, ARG002
        self.asked.append(request.container_id)
        spec = {"linux": {"cgroupsPath": f"/pods/{request.container_id}"}} if request.container_id == "a" else {}
        return api.ContainerStatusResponse(info={"info": json.dumps({"runtimeSpec": spec})})

    def GetContainerEvents(self, request: Any, context: Any) -> Iterator[api.ContainerEventResponse]:  # noqa: N802, ARG002
        if not self.announces:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
        for kind in (api.CONTAINER_CREATED_EVENT, api.CONTAINER_STARTED_EVENT, api.CONTAINER_STOPPED_EVENT):
            yield api.ContainerEventResponse(container_id="a", container_event_type=kind)


@pytest.fixture
def cri(tmp_path: Path) -> Iterator[Cri]:
    server, served = grpc.server(ThreadPoolExecutor(2)), Cri()
    cri_pb2_grpc.add_RuntimeServiceServicer_to_server(served, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    yield served
    server.stop(None).wait()


def run(tmp_path: Path, work: Any) -> Any:
    async def with_client() -> Any:
        runtime = ContainerRuntime(tmp_path / "s")
        try:
            return await work(runtime)
        finally:
            await runtime.close()

    return asyncio.run(with_client())


def test_running_containers_have_their_pod_and_their_cgroup(tmp_path: Path, cri: Cri) -> None:
    async def asked(runtime: ContainerRuntime) -> Any:
        assert await runtime.running_containers() == [RunningRow("a", "uid-a", "c"), RunningRow("b", "uid-b", "c")]
        containers = Containers(runtime, Path("/cgroup"), lambda: {"uid-a": "uid of the API", "uid-b": "uid-b"})
        first, again = await containers.running(), await containers.running()
        assert first == again
        return first

    assert run(tmp_path, asked) == [
        RunningContainer("a", "uid of the API", "c", Path("/cgroup/pods/a")),
        RunningContainer("b", "uid-b", "c", None),
    ]
    assert cri.asked == ["a", "b"], "each container is asked about once"


def test_containers_of_unknown_pods_are_left_out(tmp_path: Path, cri: Cri) -> None:
    def asked(runtime: ContainerRuntime) -> Coroutine[Any, Any, Any]:
        return Containers(runtime, Path("/cgroup"), dict).running()

    assert run(tmp_path, asked) == []
    assert cri.asked == []


def test_starts_are_announced(tmp_path: Path, cri: Cri) -> None:
    async def listened(runtime: ContainerRuntime) -> list[str]:
        return [id_ async for id_ in runtime.events()]

    assert run(tmp_path, listened) == ["a"]
    cri.announces = False
    with pytest.raises(RetryLater, match="UNIMPLEMENTED"):
        run(tmp_path, listened)


@pytest.mark.usefixtures("cri")
def test_follower_hears_of_starts_and_of_the_end_of_the_stream(tmp_path: Path) -> None:
    async def followed(runtime: ContainerRuntime) -> int:
        heard = 0

        def announced() -> None:
            nonlocal heard
            heard += 1

        task = asyncio.create_task(Containers(runtime, Path("/cgroup"), dict).follow(announced))
        async with asyncio.timeout(10):
            while heard < 2:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return heard

    assert run(tmp_path, followed) == 2
