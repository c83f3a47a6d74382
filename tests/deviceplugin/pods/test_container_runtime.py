"""The client of the container runtime."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.pods.container_runtime import ContainerRuntime
from mgpu.model.errors import RetryLater
from proto import cri_pb2 as api
from proto import cri_pb2_grpc

ENV = {
    "info": json.dumps({"pid": 1, "runtimeSpec": {"process": {"env": ["A=1", "NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"]}}})
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow slow answers, since the machine may be busy."""
    monkeypatch.setattr("deviceplugin.pods.container_runtime._QUERY_SECONDS", 60.0)


class Cri(cri_pb2_grpc.RuntimeServiceServicer):
    """A runtime with two pods. In the first one `c` runs and `init` has ended."""

    def __init__(self, info: dict[str, str], name: str = "containerd") -> None:
        self._info, self._name = info, name
        self._rows = [("1", "u", "init", api.CONTAINER_EXITED), ("2", "u", "c", api.CONTAINER_RUNNING)]
        self._rows += [("0", "u", "c", api.CONTAINER_EXITED), ("4", "u", "next", api.CONTAINER_CREATED)]
        self._rows.append(("3", "v", "c", api.CONTAINER_RUNNING))

    def ListContainers(self, request: Any, context: Any) -> api.ListContainersResponse:  # noqa: N802, ARG002
        wanted = request.filter.label_selector["io.kubernetes.pod.uid"]
        labels = {"io.kubernetes.pod.uid": wanted}
        rows = [
            api.Container(id=i, state=state, labels=labels | {"io.kubernetes.container.name": name})
            for i, uid, name, state in self._rows
            if uid == wanted
        ]
        return api.ListContainersResponse(containers=rows)

    def ContainerStatus(self, request: Any, context: Any) -> api.ContainerStatusResponse:  # noqa: N802, ARG002
        assert request.verbose
        assert request.container_id in ("1", "2"), "the one that runs counts, else the last one"
        return api.ContainerStatusResponse(info=self._info)

    def Version(self, request: Any, context: Any) -> api.VersionResponse:  # noqa: N802, ARG002
        return api.VersionResponse(runtime_name=self._name, runtime_version="1.36.0")

    def Status(self, request: Any, context: Any) -> api.StatusResponse:  # noqa: N802, ARG002
        return api.StatusResponse(info=self._info if request.verbose else {})


@contextmanager
def serving(socket: Path, info: dict[str, str], name: str = "containerd") -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2))
    cri_pb2_grpc.add_RuntimeServiceServicer_to_server(Cri(info, name), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def environments(socket: Path | None, uid: str = "u") -> Any:
    async def run() -> Any:
        runtime = ContainerRuntime(socket)
        try:
            return await runtime.environments(uid)
        finally:
            await runtime.close()

    return asyncio.run(run())


def test_environments_are_those_of_containers_that_run_or_have_run(folder: Path) -> None:
    shown = {"A": "1", "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    with serving(folder / "cri.sock", ENV):
        assert environments(folder / "cri.sock") == {"c": shown, "init": shown}
        assert environments(folder / "cri.sock", "w") == {}


NODES = [{"path": path} for path in ("/dev/nvidia3", "/dev/nvidiactl", "/dev/null", "/dev/nvidia-uvm")]
MOUNTS = [{"destination": "/var/run/nvidia-container-devices/GPU-5"}, {"destination": "/etc/hosts"}]


@pytest.mark.parametrize(
    ("env", "spec", "cards"),
    [
        (["NVIDIA_VISIBLE_DEVICES=void"], {"linux": {"devices": NODES}}, "minor:3"),
        ([], {"linux": {"devices": NODES}}, "minor:3"),
        (["NVIDIA_VISIBLE_DEVICES=GPU-1"], {"linux": {"devices": NODES}}, "GPU-1"),
        (["NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices"], {"mounts": MOUNTS}, "GPU-5"),
        (["NVIDIA_VISIBLE_DEVICES=void"], {"mounts": MOUNTS[1:], "linux": {"devices": NODES[1:]}}, "void"),
        (["NVIDIA_VISIBLE_DEVICES=void"], {"mounts": None, "linux": None}, "void"),
    ],
)
def test_cards_by_mounts_or_device_nodes_are_found(
    folder: Path, env: list[str], spec: dict[str, Any], cards: str
) -> None:
    info = {"info": json.dumps({"runtimeSpec": {"process": {"env": env}, **spec}})}
    with serving(folder / "cri.sock", info):
        assert environments(folder / "cri.sock")["c"]["NVIDIA_VISIBLE_DEVICES"] == cards


@pytest.mark.parametrize(
    "info", [{}, {"info": "{"}, {"info": "{}"}, {"info": '{"runtimeSpec": {"process": {"env": 1}}}'}]
)
def test_report_in_another_form_raises_retry_later(folder: Path, info: dict[str, str]) -> None:
    with serving(folder / "cri.sock", info), pytest.raises(RetryLater, match="not readable"):
        environments(folder / "cri.sock")


def test_missing_runtime_raises_retry_later(folder: Path) -> None:
    for socket in (None, folder / "none.sock"):
        with pytest.raises(RetryLater, match="there is no container runtime"):
            environments(socket)
    (folder / "dead.sock").touch()
    with pytest.raises(RetryLater, match="container runtime: UNAVAILABLE"):
        environments(folder / "dead.sock")


@pytest.mark.parametrize(
    ("name", "info", "wanted"),
    [
        ("containerd", {"config": json.dumps({"enableCDI": True})}, True),
        ("containerd", {"config": json.dumps({"enableCDI": False})}, False),
        ("containerd", {"config": json.dumps({"enableCDI": "yes"})}, None),
        ("containerd", {"config": "[]"}, None),
        ("other", {}, None),
        ("cri-o", {}, True),
    ],
)
def test_cdi_is_read_from_the_runtimes_configuration(
    folder: Path, name: str, info: dict[str, str], wanted: bool | None
) -> None:
    async def first() -> bool | None:
        runtime, told = ContainerRuntime(folder / "cri.sock"), asyncio.Event()
        following = asyncio.create_task(runtime.follow(told.set))
        try:
            found = await runtime.query_cdi()
            if found is not None:
                await asyncio.wait_for(told.wait(), 60)
            assert runtime.has_cdi == found
            return found
        finally:
            following.cancel()
            await runtime.close()

    with serving(folder / "cri.sock", info, name):
        assert asyncio.run(first()) is wanted


def test_cdi_of_a_missing_runtime_is_not_known(folder: Path) -> None:
    with pytest.raises(RetryLater, match="there is no container runtime"):
        asyncio.run(ContainerRuntime(folder / "cri.sock").query_cdi())
