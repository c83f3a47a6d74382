"""The Dockerfile builds what `image` says, and that suffices for the image; the image is not built."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from image import archive, contents
from requirements import check
from tests.manifests.rendered import ROOT

LINES = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
COMMANDS = ("webhook", "scheduler", "deviceplugin", "inspect", "explain", "top", "doctor", "completion")
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
    assert set(contents.PACKAGES) == packages - {"playground"}
    assert {source for source in copied() if (ROOT / source).is_dir()} == {*contents.PACKAGES, "image"}


def test_tools_are_installed_by_hash_and_image_makes_both_layers() -> None:
    text = " ".join(line.removesuffix("\\").strip() for line in LINES)
    (install,) = (part.partition(" RUN ")[0] for part in text.split("/opt/tools/bin/pip install")[1:])
    assert "--require-hashes" in install
    assert "-r requirements/build.txt" in install
    assert "python -m image.environment libraries /layers/libraries" in text
    assert "python -m image.environment mgpu /layers/mgpu && /opt/tools/bin/python -m image.layers" in text
    assert set(copied()) >= {*contents.PACKAGES, *contents.PROJECT_FILES, "requirements/runtime.txt", "image"}


def test_nothing_of_the_build_is_left_and_nobody_is_root() -> None:
    final = LINES[STAGES[-1] :]
    assert len(STAGES) == 2
    assert not [line for line in final if line.startswith("RUN ")]
    layers = ["COPY --from=build /layers/libraries/ /", "COPY --from=build /layers/mgpu/ /"]
    assert [line for line in final if line.startswith("COPY ")] == layers
    (user,) = (line.split()[1] for line in final if line.startswith("USER "))
    assert all(int(part) > 0 for part in user.split(":"))


def test_archive_has_the_configuration_of_the_dockerfile() -> None:
    final = dict(line.split(" ", 1) for line in LINES[STAGES[-1] :])
    assert final["USER"] == archive.CONFIG["User"]
    assert json.loads(final["ENTRYPOINT"]) == archive.CONFIG["Entrypoint"]
    assert json.loads(final["CMD"]) == archive.CONFIG["Cmd"]
    variables = dict(entry.split("=", 1) for entry in final["ENV"].split())
    assert variables.pop("PATH") == "/opt/mgpu/bin:$PATH"
    assert variables == archive.VARIABLES


def test_build_starts_every_command_of_the_image() -> None:
    (line,) = (line for line in LINES if line.startswith(" && for command in "))
    assert set(line.removeprefix(" && for command in ").partition(";")[0].split()) == set(COMMANDS)


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
    for source in contents.PACKAGES:
        shutil.copytree(ROOT / source, folder / source)
    (metadata,) = (file for file in distribution("mgpu").files or () if file.name == "METADATA")
    (folder / metadata.parts[0]).symlink_to(Path(str(distribution("mgpu").locate_file(metadata.parts[0]))))
    for file, path in library_files():
        if not contents.is_left_out(file):
            target = folder / file
            if not target.parent.exists():
                target.parent.mkdir(parents=True)
                (target.parent / "__pycache__").symlink_to(path.parent / "__pycache__")
            target.symlink_to(path)
    return folder


def library_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the locked libraries in this environment, with their paths in `site-packages`."""
    for requirement, *_ in check.pins((ROOT / "requirements/runtime.txt").read_text()):
        applies = requirement.marker is None or requirement.marker.evaluate()
        if applies and requirement.name not in contents.UNUSED_LIBRARIES:
            found = distribution(requirement.name)
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    yield file.as_posix(), Path(str(found.locate_file(file)))


def test_libraries_that_are_left_out_are_locked_and_every_rule_leaves_something_out() -> None:
    locked = {requirement.name for requirement, *_ in check.pins((ROOT / "requirements/runtime.txt").read_text())}
    assert locked >= set(contents.UNUSED_LIBRARIES)
    assert contents.find_unused_rules(file for file, _ in library_files()) == set()


def test_licences_of_libraries_are_not_left_out() -> None:
    licences = [file for file, _ in library_files() if ".dist-info/" in file and "LICEN" in file.upper()]
    assert len(licences) > 30
    assert not [file for file in licences if contents.is_left_out(file)]


def mgpu(image: Path, *arguments: str, code: str = "main()") -> subprocess.CompletedProcess[str]:
    """In an interpreter that sees nothing but the image."""
    code = f"import sys; sys.path.insert(0, {str(image)!r}); from mgpu.cli.main import main; {code}"
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return subprocess.run(command, cwd=image, capture_output=True, text=True, timeout=60, check=False)


def test_commands_of_the_image_start_with_the_runtime_libraries_alone(image: Path) -> None:
    each = "[main([command, '--help'], prog_name='mgpu', standalone_mode=False) for command in sys.argv[1:]]"
    done = mgpu(image, *COMMANDS, code=each)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("Usage: mgpu ")] == [*COMMANDS]


def test_every_module_of_the_image_can_be_imported(image: Path) -> None:
    """Also those that only some commands import, such as the reader of kubeconfig files."""
    packages = [path.relative_to(image) for name in contents.PACKAGES for path in (image / name).rglob("*.py")]
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in packages}
    names.remove("proto.generate")  # of `make proto`
    each = "import importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = mgpu(image, *sorted(names), code=each)
    assert done.returncode == 0, done.stderr


def test_command_with_a_kubeconfig_needs_nothing_that_the_image_leaves_out(image: Path, tmp_path: Path) -> None:
    kubeconfig = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    }
    (tmp_path / "config").write_text(json.dumps(kubeconfig))
    done = mgpu(image, "inspect", "--kubeconfig", str(tmp_path / "config"))
    assert done.returncode != 0
    assert "Connection refused" in done.stderr
    assert "Traceback" not in done.stderr


def test_image_offers_no_command_of_the_playground(image: Path) -> None:
    done = mgpu(image, "--help")
    assert done.returncode == 0, done.stderr
    offered = set(re.findall(r"^  (\w+)", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert offered == set(COMMANDS)
    for command in ("playground", "demo", "simulate"):
        assert not re.search(rf"mgpu {command}\b", done.stdout)
        refused = mgpu(image, command)
        assert refused.returncode == 2
        assert f"No such command '{command}'" in refused.stderr
