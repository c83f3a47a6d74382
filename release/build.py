"""Builds the files of a release: wheel, chart, archive for Krew, SBOM, licences and checksums.

    python -m release.build dist --uri https://…/v0.1.0

The files depend only on the commit that is checked out, so anyone can build them again and compare the checksums. The
image is not among them, because it goes to a registry (`make image`), but its SBOM is.
"""

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from krew.package import build_wheel, commit_time, package
from release.check import ROOT, version_of

HELM = ROOT / ".tools/helm"
CHART = ROOT / "manifests/chart/mgpu"
SUMS = "SHA256SUMS"


def build(folder: Path, uri: str) -> list[Path]:
    """Write all files into the folder, which must not exist, and return their paths.

    Args:
        uri: the address from which users will download the files.

    Raises:
        SystemExit: Helm is missing, or the wheel has another version than pyproject.toml.
        CalledProcessError: a program that builds a file has failed.
    """
    folder.mkdir(parents=True)
    os.environ["SOURCE_DATE_EPOCH"] = str(commit_time())
    with tempfile.TemporaryDirectory() as temporary:
        wheel = Path(shutil.copy(build_wheel(Path(temporary)), folder))
    package(folder, uri, wheel)
    _package_chart(folder)
    subprocess.run([sys.executable, "-m", "requirements.sbom", str(folder)], cwd=ROOT, check=True)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    (folder / SUMS).write_text("".join(f"{_checksum(path)}  {path.name}\n" for path in files))
    return [*files, folder / SUMS]


def _package_chart(folder: Path) -> None:
    helm = HELM if HELM.is_file() else shutil.which("helm")
    if helm is None:
        raise SystemExit("the chart needs Helm: make helm")
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([helm, "package", CHART, "--destination", temporary], check=True, stdout=subprocess.DEVNULL)
        (packed,) = Path(temporary).iterdir()
        (folder / packed.name).write_bytes(_with_times(packed, commit_time()))


def _with_times(packed: Path, seconds: int) -> bytes:
    """Return a compressed tar file with this time for all files. Helm stores the time at which it runs.

    Args:
        seconds: since 1970.
    """
    changed = io.BytesIO()
    with (
        tarfile.open(packed) as source,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=changed) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as target,
    ):
        for member in source:
            member.mtime = seconds
            target.addfile(member, source.extractfile(member))
    return changed.getvalue()


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m release.build", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the files")
    parser.add_argument("--uri", required=True, help="the address from which users will download the files")
    given = parser.parse_args(arguments)
    if given.folder.exists():
        raise SystemExit(f"{given.folder} exists already")
    print(f"mgpu {version_of((ROOT / 'pyproject.toml').read_text())}")
    for path in build(given.folder.resolve(), given.uri):
        print(f"  {path.name}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
