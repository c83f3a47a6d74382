"""Makes the archive for Krew and the manifest with its checksum. Two runs of one commit make the same files.

python -m krew.package FOLDER --uri https://…/v0.1.0       both, from the commit that is checked out
python -m krew.package FOLDER --uri … --wheel mgpu-….whl   with a wheel that was built already
"""

import argparse
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "krew/mgpu.yaml"
PROGRAM = "kubectl-mgpu"
EXAMPLE = "https://downloads.example/mgpu"


def make_archive(wheel: Path, seconds: int) -> bytes:
    """Return the archive, a tar file that is compressed by gzip.

    Args:
        seconds: the time of all files, since 1970.
    """
    contents = {
        PROGRAM: (ROOT / "krew" / PROGRAM, 0o755),
        "LICENSE": (ROOT / "LICENSE", 0o644),
        "requirements.txt": (ROOT / "requirements/runtime.txt", 0o644),
        wheel.name: (wheel, 0o644),
    }
    written = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=written) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, (path, mode) in sorted(contents.items()):
            data = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = mode
            entry.mtime = seconds
            archive.addfile(entry, io.BytesIO(data))
    return written.getvalue()


def fill_manifest(text: str, version: str, uri: str, checksum: str) -> str:
    """Return the manifest of a release.

    Args:
        text: the manifest of this checkout.
        uri: where the archive can be downloaded.
        checksum: of the archive, by SHA-256.
    """
    values: Mapping[str, str] = {"version": f"v{version}", "uri": uri, "sha256": f'"{checksum}"'}
    for key, value in values.items():
        text = re.sub(rf"^( +{key}: ).*$", rf"\g<1>{value}", text, flags=re.M)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the commit that is checked out, from a copy: setuptools would write into the checkout."""
    sources = folder / "sources"
    sources.mkdir()
    commit = _git("rev-parse", "--short=12", "HEAD")
    packed = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(sources, filter="data")
    environment = {**os.environ, "MGPU_COMMIT": commit, "SOURCE_DATE_EPOCH": str(commit_time())}
    uv = Path(sys.executable).parent / "uv"
    options = ("--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder))
    subprocess.run([uv, "build", *options, sources], env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def commit_time() -> int:
    """Return when the commit was made, or what SOURCE_DATE_EPOCH says."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def package(folder: Path, uri: str, wheel: Path) -> Path:
    """Write the archive and the manifest into the folder, and return the path of the manifest.

    Args:
        uri: the address of the folder from which users will download the archive.

    Raises:
        SystemExit: the wheel has another version than pyproject.toml.
    """
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    if not wheel.name.startswith(f"mgpu-{version}-"):
        raise SystemExit(f"{wheel.name} is not a wheel of version {version}")
    archive = make_archive(wheel, commit_time())
    name = f"mgpu-krew-v{version}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(archive)
    checksum = hashlib.sha256(archive).hexdigest()
    manifest = folder / MANIFEST.name
    manifest.write_text(fill_manifest(MANIFEST.read_text(), version, f"{uri.rstrip('/')}/{name}", checksum))
    return manifest


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m krew.package", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the archive and mgpu.yaml")
    parser.add_argument("--uri", default=f"{EXAMPLE}/latest", help="the address of the folder with the archive")
    parser.add_argument("--wheel", type=Path, help="the wheel to put into the archive; by default it is built")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        print(package(given.folder, given.uri, given.wheel or build_wheel(Path(temporary))))


if __name__ == "__main__":
    main(sys.argv[1:])
