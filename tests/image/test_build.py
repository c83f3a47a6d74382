import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "image/build.sh"
TOOLS = ("sh", "git", "dirname")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder for PATH with what the script needs besides an engine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True, check=True)
        (folder / name).symlink_to(found.stdout.strip())
    (folder / "python3").symlink_to(sys.executable)
    return folder


def add_engine(path: Path, name: str, *, works: bool) -> None:
    info = "exit 0" if works else "exit 1"
    (path / name).write_text(f'#!/bin/sh\n[ "$1" != info ] || {info}\necho "{name}: $@"\n')
    (path / name).chmod(0o755)


def build(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "SOURCE_DATE_EPOCH": "1700000000"}
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_an_engine_the_message_names_the_other_way(path: Path) -> None:
    add_engine(path, "docker", works=False)
    done = build(path, "mgpu:1")
    assert done.returncode == 1
    assert "make image-archive" in done.stderr


def test_first_engine_that_works_builds(path: Path) -> None:
    add_engine(path, "docker", works=False)
    add_engine(path, "podman", works=True)
    add_engine(path, "buildah", works=True)
    done = build(path, "mgpu:1")
    assert done.returncode == 0, done.stderr
    assert "podman: build --layers --timestamp 1700000000 " in done.stdout
    assert "--build-arg SOURCE_DATE_EPOCH=1700000000 --tag mgpu:1 ." in done.stdout


def test_base_is_passed_to_the_engine(path: Path) -> None:
    add_engine(path, "docker", works=True)
    done = build(path, "mgpu:1", "python:3.12-slim@sha256:0")
    assert "docker: build --build-arg BASE=python:3.12-slim@sha256:0 --build-arg MGPU_COMMIT=" in done.stdout
