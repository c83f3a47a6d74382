"""What each process and command imports when it starts. import-linter checks which modules may import a library at all;
these tests are about what is loaded, since most processes need some libraries only in rare cases.
"""

import subprocess
import sys
from collections.abc import Iterable

import pytest

SERVERS = {"flask", "gunicorn", "werkzeug"}
KUBECONFIG = {"kubernetes", "oauthlib", "requests"}
"""What reads kubeconfig files. The kubernetes package imports the others."""
ELSEWHERE = {"aiohttp", "hypothesis", "jsonpatch", "matplotlib", "playground", "pytest", "setuptools", "tests"}
"""The libraries of the playground and of developers."""
NEVER = ELSEWHERE | KUBECONFIG | {"cel_expr_python"}
"""The scheduler imports CEL when it reads the first selector."""
AGENT = {"deviceplugin", "google.protobuf", "grpc", "proto", "pynvml"}

FORBIDDEN = {
    "webhook.main": NEVER | AGENT | {"msgspec", "numpy", "prometheus_client", "rich", "scheduler"},
    "scheduler.main": NEVER | AGENT | {"rich", "webhook"},
    "deviceplugin.main": NEVER | SERVERS | {"cryptography", "msgspec", "numpy", "rich", "scheduler", "webhook"},
    "mgpu.cli.main": NEVER | AGENT | SERVERS | {"cryptography", "numpy", "pydantic", "rich", "scheduler", "urllib3"},
    "mgpu.cli.doctor.command": NEVER | AGENT | SERVERS | {"numpy", "prometheus_client", "scheduler"},
} | {
    command: NEVER | AGENT | SERVERS | {"cryptography", "numpy", "prometheus_client", "scheduler.engine"}
    for command in ("scheduler.inspect_command", "scheduler.explain_command", "mgpu.cli.top")
}
"""What must not be loaded after the import of a module: each name stands for itself and the modules below it."""

MOST_MIB = 48.0
"""The most memory of its own that the agent may take for its imports. On 2026-11-24 it took 38 MiB with Python 3.11.

Pages of mapped files, such as the 20 MiB of libraries that are shared objects, are not counted, because their number
depends on what else the machine runs. If the agent exceeds this, look for the cause with `python -X importtime`
(docs/performance.md) before you raise it.
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def within(modules: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return those of the names that are among the modules, or have a module below them there."""
    loaded = set(modules)
    return {name for name in names if any(module == name or module.startswith(f"{name}.") for module in loaded)}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_start_loads_no_library_that_it_does_not_need(module: str) -> None:
    loaded = run(f"import sys, {module}; print(*sys.modules, sep='\\n')").splitlines()
    assert module in loaded
    assert within(loaded, FORBIDDEN[module]) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_imports_of_the_agent_take_little_memory() -> None:
    status = run("import deviceplugin.main; print(open('/proc/self/status').read())")
    assert int(status.partition("RssAnon:")[2].split()[0]) / 1024 < MOST_MIB
