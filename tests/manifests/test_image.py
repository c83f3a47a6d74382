"""The files that the Dockerfile copies exist and suffice for the image; the image is not built."""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from requirements import check
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


def test_packages_of_the_processes_are_copied_and_the_playground_is_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    packages = {name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)}
    assert {source for source in copied() if (ROOT / source).is_dir()} == packages - {"playground"}


def test_libraries_are_installed_by_hash_and_the_package_without_dependencies() -> None:
    text = " ".join(line.removesuffix("\\").strip() for line in LINES)
    installs = [part.partition(" && ")[0] for part in text.split("/opt/mgpu/bin/pip install")[1:]]
    assert len(installs) == 2
    assert "--require-hashes" in installs[0]
    assert "-r requirements/runtime.txt -r requirements/build.txt" in installs[0]
    assert "--no-deps" in installs[1]
    assert "--no-build-isolation" in installs[1]


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
    found = re.fullmatch(r"python:(\d+)\.(\d+)-slim@sha256:[0-9a-f]{64}", base)
    assert found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = re.fullmatch(r">=(\d+)\.(\d+)", project["requires-python"])
    assert least
    assert tuple(map(int, found.groups())) >= tuple(map(int, least.groups()))


@pytest.mark.parametrize(
    ("base", "code"), [("python:3.13-slim", 1), ("python:3.13-slim@sha256:" + "0" * 64, 0)], ids=["tag", "digest"]
)
def test_base_image_without_a_digest_is_refused(base: str, code: int) -> None:
    (check,) = (line.removeprefix("RUN ") for line in LINES if line.startswith("RUN case "))
    done = subprocess.run(["sh", "-c", check], env={"BASE": base}, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("must name its digest" in done.stderr) == bool(code)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image has, as far as a test can make it: the copied packages with their metadata, and of the libraries
    of this environment the locked ones of the runtime. What is compiled already need not be compiled again.
    """
    folder = tmp_path_factory.mktemp("image")
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / source)
    (metadata,) = (file for file in distribution("mgpu").files or () if file.name == "METADATA")
    (folder / metadata.parts[0]).symlink_to(Path(str(distribution("mgpu").locate_file(metadata.parts[0]))))
    for requirement, *_ in check.pins((ROOT / "requirements/runtime.txt").read_text()):
        if requirement.marker is None or requirement.marker.evaluate():
            for file in distribution(requirement.name).files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (folder / top).exists():
                    (folder / top).symlink_to(Path(str(distribution(requirement.name).locate_file(top))))
    return folder


def mgpu(image: Path, *arguments: str, code: str = "main()") -> subprocess.CompletedProcess[str]:
    """In an interpreter that sees nothing but the image."""
    code = f"import sys; sys.path.insert(0, {str(image)!r}); from mgpu.cli.main import main; {code}"
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return subprocess.run(command, cwd=image, capture_output=True, text=True, timeout=60, check=False)


def test_commands_of_the_image_start_with_the_runtime_libraries_alone(image: Path) -> None:
    commands = ("webhook", "scheduler", "deviceplugin", "inspect", "explain", "top", "doctor", "completion")
    each = "[main([command, '--help'], prog_name='mgpu', standalone_mode=False) for command in sys.argv[1:]]"
    done = mgpu(image, *commands, code=each)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("Usage: mgpu ")] == [*commands]


def test_image_offers_no_command_of_the_playground(image: Path) -> None:
    done = mgpu(image, "--help")
    assert done.returncode == 0, done.stderr
    offered = set(re.findall(r"^  (\w+)", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert offered == {"webhook", "scheduler", "deviceplugin", "inspect", "explain", "top", "doctor", "completion"}
    for command in ("playground", "demo", "simulate"):
        assert not re.search(rf"mgpu {command}\b", done.stdout)
        refused = mgpu(image, command)
        assert refused.returncode == 2
        assert f"No such command '{command}'" in refused.stderr
