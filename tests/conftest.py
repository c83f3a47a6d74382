"""How hypothesis looks for examples. A normal run tries the same ones every time: it says whether a change broke
something, not whether luck ran out. `MGPU_TEST_EXAMPLES=fresh` tries others, `soak` (make soak) many others.

A test that says itself how many uses `tests.examples.examples`: a bare `settings(max_examples=...)` would hold in all.
"""

import gc
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, settings

from playground import processes
from tests import warm
from tests.examples import MODE, SOAK_EXAMPLES

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fresh", deadline=None, suppress_health_check=_quiet, print_blob=True)
settings.register_profile("normal", settings.get_profile("fresh"), derandomize=True, max_examples=20)
settings.register_profile("soak", settings.get_profile("fresh"), max_examples=SOAK_EXAMPLES, stateful_step_count=100)
settings.load_profile(MODE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker of pytest-xdist compile a part of the modules before it collects all of them.

    Every worker collects all modules in the same order. After a fresh clone, each would rewrite the assertions of all
    of them, at the same time as the others: 10 s of CPU per worker. So each finds most of them in the others' caches.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    root = session.config.rootpath
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        with suppress(Exception):  # The collection reports the error.
            import_module(".".join(path.relative_to(root).with_suffix("").parts))


# The collection makes millions of objects that stay. It takes a quarter less time if garbage is looked for less often.
gc.set_threshold(20_000, 20, 100)


def pytest_collection_finish() -> None:
    """A collection of garbage need not walk the thousands of tests and all that they import, again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test with the marker `kubernetes` if the real API server that it would run on is older.

    The playground's own API server follows the newest version that the marker names.
    """
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    marker = item.get_closest_marker("kubernetes")
    callspec = getattr(item, "callspec", None)
    if not folder or marker is None or (callspec is not None and "playground" in callspec.params.values()):
        return
    if (version := _version(Path(folder))) < marker.args:
        pytest.skip(f"needs Kubernetes {'.'.join(map(str, marker.args))}: this is {'.'.join(map(str, version))}")


@cache
def _version(folder: Path) -> tuple[int, ...]:
    done = subprocess.run([folder / "kube-apiserver", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"v(\d+)\.(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2])


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> Iterator[None]:
    """The processes of clusters are forked from warm interpreters."""
    executed = processes.spawn

    def spawn(
        command: Sequence[str], environ: Mapping[str, str], out: IO[bytes], orphaned: signal.Signals
    ) -> processes.Child:
        # A warm interpreter has imported the packages of this checkout already.
        is_elsewhere = environ.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
        if is_elsewhere or list(command[1:3]) != ["-m", "mgpu.cli.main"]:
            return executed(command, environ, out, orphaned)
        return warm.fork(command[1:], environ, out, errors=True, session=True, orphaned=orphaned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "spawn", spawn)
        yield
    warm.close()
