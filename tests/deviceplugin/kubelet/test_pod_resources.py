"""The owners of device ids by the kubelet's PodResources API."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.kubelet.pod_resources import Owner, PodResources
from mgpu.model.errors import RetryLater
from proto import podresources_pb2 as api
from proto import podresources_pb2_grpc


class Kubelet:
    """The PodResources service. It answers once `go_on` is set; the query of number `failing` fails."""

    def __init__(self) -> None:
        self.queries = 0
        self.go_on = threading.Event()
        self.error: grpc.StatusCode | None = None
        self.failing = 0
        self.more = 0

    def List(self, request: Any, context: Any) -> api.ListPodResourcesResponse:  # noqa: N802, ARG002
        self.queries += 1
        if self.queries == self.failing:
            context.abort(grpc.StatusCode.UNAVAILABLE, "this one")
        self.go_on.wait(60)
        if self.error:
            context.abort(self.error, "rejected by rate limit")
        numa = [api.ContainerDevices(resource_name="r", device_ids=[i]) for i in ("1", "2")]
        other = api.ContainerDevices(resource_name="other", device_ids=["3"])
        container = api.ContainerResources(name="c", devices=[*numa, other])
        plain = api.ContainerResources(name="plain")
        listed = [api.PodResources(name="p", namespace="ns", containers=[container, plain])]
        many = [api.ContainerResources(name=f"{i:063}") for i in range(6000 if self.more else 0)]
        listed += [api.PodResources(name=f"q{i}", namespace="tenant", containers=many) for i in range(self.more)]
        return api.ListPodResourcesResponse(pod_resources=listed)

    Get = GetAllocatableResources = List


@pytest.fixture
def kubelet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubelet]:
    """The query may take a minute, since the machine may be busy."""
    monkeypatch.setattr("deviceplugin.kubelet.pod_resources._QUERY_SECONDS", 60.0)
    service = Kubelet()
    server = grpc.server(ThreadPoolExecutor(4))
    podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{folder / 'k.sock'}")
    server.start()
    yield service
    server.stop(None).wait()


def ask(folder: Path, times: int = 1) -> list[list[Owner]]:
    async def run() -> list[list[Owner]]:
        client = PodResources(folder / "k.sock")
        try:
            return await asyncio.gather(*(client.owners("r") for _ in range(times)))
        finally:
            await client.close()

    return asyncio.run(run())


def test_owner_has_the_ids_of_all_numa_nodes(folder: Path, kubelet: Kubelet) -> None:
    kubelet.go_on.set()
    assert ask(folder) == [[Owner("ns", "p", "c", frozenset({"1", "2"}))]]


def test_concurrent_callers_share_one_query(folder: Path, kubelet: Kubelet) -> None:
    threading.Timer(0.05, kubelet.go_on.set).start()
    assert len(ask(folder, 50)) == 50
    assert kubelet.queries <= 2


def test_failed_query_gives_waiting_callers_no_older_answer(folder: Path, kubelet: Kubelet) -> None:
    kubelet.failing = 2

    async def run() -> list[Any]:
        client = PodResources(folder / "k.sock")
        first = asyncio.create_task(client.owners("r"))
        while not kubelet.queries:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(client.owners("r")) for _ in range(2)]
        await asyncio.sleep(0)
        kubelet.go_on.set()
        answers = await asyncio.gather(first, *waiting, return_exceptions=True)
        await client.close()
        return answers

    _, failed, answer = asyncio.run(run())
    assert isinstance(failed, RetryLater)
    assert answer
    assert kubelet.queries == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
def test_refused_query_raises_retry_later(folder: Path, kubelet: Kubelet, code: grpc.StatusCode) -> None:
    kubelet.error = code
    kubelet.go_on.set()
    with pytest.raises(RetryLater, match=code.name):
        ask(folder)


def test_answer_contains_only_containers_with_ids(folder: Path, kubelet: Kubelet) -> None:
    kubelet.more = 10  # 4 MiB
    kubelet.go_on.set()
    assert ask(folder) == [[Owner("ns", "p", "c", frozenset({"1", "2"}))]]


def test_too_large_answer_raises_retry_later(folder: Path, kubelet: Kubelet) -> None:
    """A tenant chooses the number of containers. Decoding 44 MB took 165 MiB of the agent's 256 MiB."""
    kubelet.more = 45
    kubelet.go_on.set()
    with pytest.raises(RetryLater, match=r"RESOURCE_EXHAUSTED: .*larger than max"):
        ask(folder)


def test_missing_kubelet_raises_retry_later(folder: Path) -> None:
    with pytest.raises(RetryLater, match="UNAVAILABLE"):
        ask(folder)
