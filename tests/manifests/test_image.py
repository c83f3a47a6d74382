"""The image, as far as that can be told without building it: what it copies is there and is all that it needs."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.manifests.rendered import ROOT

LINES = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
STAGES = [i for i, line in enumerate(LINES) if line.startswith("FROM ")]


def copied() -> list[str]:
    """What the build takes from the checkout."""
    lines = [line.split()[1:-1] for line in LINES if line.startswith("COPY ") and "--from" not in line]
    return [source for sources in lines for source in sources]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    for source in copied():
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(copied())


def test_all_packages_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    needed = {name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)}
    assert needed <= set(copied())


def test_nothing_of_the_build_is_left_and_nobody_is_root() -> None:
    final = LINES[STAGES[-1] :]
    assert len(STAGES) == 2
    assert not [line for line in final if line.startswith("RUN ")]
    assert [line for line in final if line.startswith("COPY ")] == ["COPY --from=build /opt/mgpu /opt/mgpu"]
    (user,) = (line.split()[1] for line in final if line.startswith("USER "))
    assert all(int(part) > 0 for part in user.split(":"))
    assert 'ENTRYPOINT ["mgpu"]' in final


def test_the_base_image_has_no_host_and_a_python_that_the_project_takes() -> None:
    (base,) = (line.partition("=")[2] for line in LINES if line.startswith("ARG BASE="))
    found = re.fullmatch(r"python:(\d+)\.(\d+)-slim", base)
    assert found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = re.fullmatch(r">=(\d+)\.(\d+)", project["requires-python"])
    assert least
    assert tuple(map(int, found.groups())) >= tuple(map(int, least.groups()))


def test_the_commands_load_from_what_is_copied_alone(tmp_path: Path) -> None:
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = project["entry-points"]["mgpu.commands"]
    entries = [project["scripts"]["mgpu"], *(commands[name] for name in ("webhook", "scheduler", "deviceplugin"))]
    code = [f"import {e.partition(':')[0]} as m; print(m.__file__); m.{e.partition(':')[2]}" for e in entries]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(f"{tmp_path}/") for line in done.stdout.splitlines())
    assert len(done.stdout.splitlines()) == 4
