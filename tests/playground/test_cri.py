"""The CRI service of the playground's runtime, called by the node agent's client."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.pods.container_runtime import ContainerRuntime
from playground.container_runtime import RunOptions, Runtime
from playground.cri import Cri
from tests import builders as b

CONTAINER = {"name": "c", "image": "x", "env": [{"name": "A", "value": "1"}]}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr("deviceplugin.pods.container_runtime._QUERY_SECONDS", 60.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="c") as path:
        yield Path(path)


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    made = Runtime(folder)
    cri = Cri(folder / "cri.sock", made)
    cri.start()
    yield made
    cri.stop()


def request(folder: Path, question: Callable[[ContainerRuntime], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        asked = ContainerRuntime(folder / "cri.sock")
        try:
            return await question(asked)
        finally:
            await asked.close()

    return asyncio.run(run())


def start(runtime: Runtime) -> str:
    """The UID of a pod whose container was started."""
    return runtime.start(b.share("p"), CONTAINER, RunOptions()).uid


def test_cri_running_container_is_listed_with_its_environment(folder: Path, runtime: Runtime) -> None:
    uid = start(runtime)
    assert request(folder, lambda cri: cri.is_running(uid, sandbox=False)) is True
    assert request(folder, lambda cri: cri.environments(uid)) == {"c": {"A": "1"}}
    assert request(folder, lambda cri: cri.is_running("another", sandbox=True)) is False
    assert request(folder, lambda cri: cri.live_pods()) == {uid}
    assert request(folder, lambda cri: cri.query_cdi()) is True


def test_cri_pod_between_containers_runs_until_its_sandbox_is_removed(folder: Path, runtime: Runtime) -> None:
    uid = start(runtime)
    runtime.end(runtime.containers(uid)[0])
    assert request(folder, lambda cri: cri.is_running(uid, sandbox=False)) is False
    assert request(folder, lambda cri: cri.is_running(uid, sandbox=True)) is True
    assert request(folder, lambda cri: cri.live_pods()) == {uid}
    runtime.remove_sandbox(uid)
    assert request(folder, lambda cri: cri.live_pods()) == frozenset()
    assert request(folder, lambda cri: cri.is_running(uid, sandbox=True)) is False


def test_cri_stop_kills_containers(folder: Path, runtime: Runtime) -> None:
    uid = start(runtime)
    assert request(folder, lambda cri: cri.stop_containers(uid)) == 1
    assert [c.exit_code for c in runtime.containers(uid)] == [137]


def test_cri_after_reboot_lists_nothing(folder: Path, runtime: Runtime) -> None:
    uid = start(runtime)
    runtime.reboot()
    assert request(folder, lambda cri: cri.is_running(uid, sandbox=True)) is False
