"""Makes the two layers of the image: a folder with the libraries, and a folder with mgpu itself.

Both are parts of one virtual environment in /opt/mgpu. A new version of mgpu with the same libraries changes only the
second layer. Two builds of one commit make the same files.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from image.contents import PACKAGES, PROJECT_FILES, UNUSED_LIBRARIES, is_left_out
from image.layers import epoch

ROOT = Path(__file__).parents[1]
PLACE = Path("opt/mgpu")
LIBRARY_TIME = 315532800
"""The time of the libraries' files, the beginning of 1980. With the time of the commit, each commit would have another
layer of the same libraries."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_START = re.compile(r"\A#!.*\n('''exec'.*\n' '''\n)?")
"""How pip starts a program: with one line, or with three if the path of Python is long."""


def make_libraries(layer: Path, interpreter: str) -> None:
    """Make the layer with the libraries that requirements/runtime.txt locks.

    Args:
        interpreter: the path of Python in the base image, of the same minor version as the Python that runs this.
    """
    if Path(interpreter).name != PYTHON:
        raise SystemExit(f"{interpreter} is not {PYTHON}, which builds the image and writes its bytecode")
    folder = layer / PLACE
    _make_environment(folder)
    packages = _packages(folder)
    lock = ROOT / "requirements/runtime.txt"
    _install(folder, "--require-hashes", "--only-binary", ":all:", "-r", str(lock))
    _pip(folder, "uninstall", "--yes", *UNUSED_LIBRARIES)
    for path in packages.rglob("*"):
        if not path.is_dir() and is_left_out(path.relative_to(packages).as_posix()):
            path.unlink()
    shutil.rmtree(folder / "bin")  # the programs of the libraries
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(interpreter)
    (folder / "bin/python3").symlink_to("python")
    (folder / "pyvenv.cfg").write_text(f"home = {Path(interpreter).parent}\ninclude-system-site-packages = false\n")
    _finish(layer, LIBRARY_TIME)


def make_mgpu(layer: Path, commit: str) -> None:
    """Make the layer with mgpu's packages and programs.

    Args:
        commit: what `mgpu --version` shows.
    """
    folder = layer / PLACE
    _make_environment(folder)
    # The links to Python and pyvenv.cfg are in the layer of the libraries, and nobody needs the activation scripts.
    of_venv = set(folder.rglob("*"))
    with tempfile.TemporaryDirectory() as temporary:
        _install(folder, "--no-deps", str(_build_wheel(Path(temporary), commit)))
    for path in of_venv:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    for path in (folder / "bin").iterdir():
        path.write_text(_START.sub(f"#!/{PLACE}/bin/python\n", path.read_text()))
    _finish(layer, epoch())


def _build_wheel(folder: Path, commit: str) -> Path:
    """Build from a copy: setuptools would write into the checkout, and reuse what older builds have left there."""
    sources = folder / "sources"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PROJECT_FILES:
        shutil.copy(ROOT / name, sources)
    environment = {**os.environ, "MGPU_COMMIT": commit}
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir")
    _run(sys.executable, "-m", "pip", "wheel", *options, folder, sources, environment=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def find_commit() -> str:
    """Return the commit of this checkout; without one, what the variable MGPU_COMMIT says, or `unknown`."""
    from mgpu.commit import VARIABLE, read_commit  # Only now: the Dockerfile copies mgpu after the libraries are there.

    return read_commit(ROOT) or os.environ.get(VARIABLE) or "unknown"


def _make_environment(folder: Path) -> None:
    if folder.exists():
        raise SystemExit(f"{folder} exists already")
    _run(sys.executable, "-m", "venv", "--without-pip", folder)


def _packages(folder: Path) -> Path:
    return folder / f"lib/{PYTHON}/site-packages"


def _install(folder: Path, *arguments: str) -> None:
    _pip(folder, "install", "--no-compile", "--no-warn-script-location", *arguments)


def _pip(folder: Path, command: str, *arguments: str) -> None:
    """Run the pip of this environment on another one, which has no pip."""
    options = ("--quiet", "--disable-pip-version-check", "--python", folder / "bin/python")
    _run(sys.executable, "-m", "pip", *options, command, *arguments)


def _finish(layer: Path, seconds: int) -> None:
    """Remove what differs between builds or is of no use, compile to bytecode, and set all modes and times.

    Args:
        seconds: the time of all files, since 1970.
    """
    folder = layer / PLACE
    packages = _packages(folder)
    for path in packages.glob("*.dist-info/direct_url.json"):
        path.unlink()  # names the temporary folder of the wheel
    for record in packages.glob("*.dist-info/RECORD"):
        _correct_record(record)
    # The root is read-only in a cluster, so the bytecode is written now, and never compared with the sources.
    options = ("-q", "--invalidation-mode", "unchecked-hash", "-s", layer, "-p", "/")
    _run(sys.executable, "-m", "compileall", *options, packages)
    for path in sorted(layer.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
    for path in (layer, *layer.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (seconds, seconds), follow_symlinks=False)


def _correct_record(record: Path) -> None:
    """Remove the rows of files that are left out, and the hashes of programs, whose first line has changed."""
    packages = record.parents[1]
    with record.open(newline="") as file:
        rows = [row for row in csv.reader(file) if (packages / row[0]).exists()]
    with record.open("w", newline="") as file:
        for path, *checks in rows:
            csv.writer(file, lineterminator="\n").writerow([path, *(["", ""] if path.startswith("../") else checks)])


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], env=environment, check=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m image.environment", description=__doc__)
    parser.add_argument("what", choices=["libraries", "mgpu"])
    parser.add_argument("layer", type=Path, help="the folder to make, which contains opt/mgpu afterwards")
    parser.add_argument("--interpreter", default=f"{sys.base_prefix}/bin/{PYTHON}", help="Python in the base image")
    given = parser.parse_args(arguments)
    if given.what == "libraries":
        make_libraries(given.layer.resolve(), given.interpreter)
    else:
        make_mgpu(given.layer.resolve(), find_commit())


if __name__ == "__main__":
    main(sys.argv[1:])
