"""The program that Krew puts on the PATH, with programs in place of uv and Python that record how they are called."""

import shutil
import subprocess
from pathlib import Path

import pytest

from krew.package import PROGRAM, ROOT

PYTHON = '#!/bin/sh\necho "$@"\n'
UV = f"""#!/bin/sh
echo "uv $@" >> "$LOG"
echo "$PWD" >> "$LOG.folders"
echo noise
case "$1 ${{FAIL:-}}" in
venv*) for folder; do :; done; mkdir -p "$folder/bin"; printf '%s' '{PYTHON}' > "$folder/bin/python"
       chmod +x "$folder/bin/python" ;;
'pip yes') exit 3 ;;
esac
"""
PYTHON3 = f"""#!/bin/sh
echo "python3 $@" >> "$LOG"
echo "$PWD" >> "$LOG.folders"
case $1 in
--version) echo 'Python 3.9.1' ;;
-I) [ "$2" != -c ] || exit "${{OLD:-0}}"
    mkdir -p "$4/bin"; printf '%s' '{PYTHON}' > "$4/bin/python"; chmod +x "$4/bin/python" ;;
esac
"""


class Plugin:
    """The plugin as Krew installs it: a folder, and a link to the program in it.

    Attributes:
        tools: the only folder of the PATH with tools that are not part of every system.
    """

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store of mgpu"
        self.tools = folder / "tools"
        self.log = folder / "log"
        for path in (self.store, self.tools, folder / "bin"):
            path.mkdir()
        shutil.copy(ROOT / "krew" / PROGRAM, self.store)
        (self.store / "requirements.txt").touch()
        (self.store / "mgpu-0.1.0-py3-none-any.whl").touch()
        self.link = folder / "bin" / PROGRAM
        self.link.symlink_to(Path("..") / self.store.name / PROGRAM)
        for name in ("sh", "readlink", "dirname", "mv", "rm", "mkdir", "chmod"):
            found = shutil.which(name)
            assert found
            (self.tools / name).symlink_to(found)

    def has(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def run(self, *arguments: str, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.tools), "LOG": str(self.log), **environ}
        command = [str(self.link), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30, cwd=folder)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def left(self) -> list[str]:
        return sorted(path.name for path in self.store.glob("environment*"))


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def test_first_run_installs_the_locked_libraries_and_the_wheel(plugin: Plugin) -> None:
    plugin.has("uv", UV)
    done = plugin.run("top", "-o", "json")
    assert (done.returncode, done.stdout) == (0, "-I -m mgpu.cli.kubectl top -o json\n")
    assert done.stderr.startswith("kubectl mgpu: installing its libraries once")
    venv, libraries, own = plugin.calls()
    assert venv.startswith("uv venv ")
    assert "--require-hashes --only-binary :all: -r" in libraries
    assert own.endswith("mgpu-0.1.0-py3-none-any.whl")
    assert "--no-deps" in own
    assert plugin.left() == ["environment"]


def test_later_runs_install_nothing(plugin: Plugin) -> None:
    plugin.has("uv", UV)
    plugin.run("top")
    (plugin.tools / "uv").unlink()
    done = plugin.run("inspect", "two words")
    assert (done.returncode, done.stdout, done.stderr) == (0, "-I -m mgpu.cli.kubectl inspect two words\n", "")


def test_without_uv_python_installs(plugin: Plugin) -> None:
    plugin.has("python3", PYTHON3)
    done = plugin.run("top")
    assert (done.returncode, done.stdout) == (0, "-I -m mgpu.cli.kubectl top\n")
    assert "-I -m pip --quiet --disable-pip-version-check install --require-hashes" in done.stderr


@pytest.mark.parametrize(("name", "tool"), [("uv", UV), ("python3", PYTHON3)])
def test_current_folder_takes_no_part_in_the_installation(plugin: Plugin, tmp_path: Path, name: str, tool: str) -> None:
    """In a checkout of somebody else, Python ran its venv.py, and uv trusted the cache that its uv.toml names."""
    plugin.has(name, tool)
    assert plugin.run("top", folder=tmp_path).returncode == 0
    assert {*(tmp_path / "log.folders").read_text().splitlines()} == {str(plugin.store)}
    if name == "python3":
        assert all(call.startswith("python3 -I ") for call in plugin.calls())


@pytest.mark.parametrize(("has_python", "reason"), [(True, "this is Python 3.9.1"), (False, "Python 3.11 or newer\n")])
def test_without_a_new_python_the_error_says_what_is_needed(plugin: Plugin, has_python: bool, reason: str) -> None:
    if has_python:
        plugin.has("python3", PYTHON3)
    done = plugin.run("top", OLD="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: kubectl mgpu needs" in done.stderr
    assert reason in done.stderr
    assert plugin.left() == []


def test_installation_that_fails_leaves_nothing_and_is_tried_again(plugin: Plugin) -> None:
    plugin.has("uv", UV)
    assert plugin.run("top", FAIL="yes").returncode == 3
    assert plugin.left() == []
    assert plugin.run("top").returncode == 0


def test_completion_does_not_install(plugin: Plugin) -> None:
    plugin.has("uv", UV)
    done = plugin.run("__complete", "top", "")
    assert (done.returncode, done.stdout, done.stderr, plugin.calls()) == (1, "", "", [])
