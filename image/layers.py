"""Packs folders as layers of an image, and holds their size.

A layer depends only on the names, bytes, modes and link targets of its files. They belong to root, and have one time.
"""

import gzip
import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MOST_BYTES = 70_000_000
"""The most bytes of the compressed layers with the libraries and mgpu, without the base image. docs/install.md states
the present size. If an update needs more, decide it here."""
_LEVEL = 6
"""Of gzip. Level 9 takes three times as long and saves 1%."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed layer, whose file has its digest as name.

    Attributes:
        digest: the SHA-256 of the compressed bytes.
        diff_id: the SHA-256 of the uncompressed bytes.
        size: the number of the compressed bytes.
    """

    digest: str
    diff_id: str
    size: int


def epoch() -> int:
    """Return SOURCE_DATE_EPOCH in seconds since 1970, which the callers set to the time of the commit; 0 without it."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", "0"))


def pack(folder: Path, blobs: Path, seconds: int) -> Layer:
    """Write the layer with the content of a folder into the folder `blobs`.

    Args:
        seconds: the time of all files.
    """
    with tempfile.TemporaryFile() as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(folder.rglob("*")):
                entry = tar.gettarinfo(path, path.relative_to(folder).as_posix())
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.mtime = seconds
                if entry.isreg():
                    with path.open("rb") as content:
                        tar.addfile(entry, content)
                else:
                    tar.addfile(entry)
        plain.seek(0)
        return compress(plain, blobs)


def compress(plain: IO[bytes], blobs: Path) -> Layer:
    """Write the layer with the bytes of a tar file, which is not compressed, into the folder `blobs`."""
    temporary = blobs / "layer"
    diff_id = hashlib.sha256()
    with temporary.open("wb") as file, gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
        while block := plain.read(1 << 20):
            diff_id.update(block)
            packed.write(block)
    with temporary.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    temporary.rename(blobs / digest)
    return Layer(digest, diff_id.hexdigest(), (blobs / digest).stat().st_size)


def check_size(layers: Sequence[Layer]) -> None:
    """Print the compressed size of the layers. Raises SystemExit if they have more than `MOST_BYTES` together."""
    size = sum(layer.size for layer in layers)
    print(f"mgpu's layers: {size / 1e6:.1f} MB compressed ({' + '.join(f'{one.size / 1e6:.1f}' for one in layers)})")
    if size > MOST_BYTES:
        raise SystemExit(f"They may have {MOST_BYTES / 1e6:.0f} MB (image/layers.py). See image/contents.py.")


def main(arguments: Sequence[str]) -> None:
    """Check the size of the layers in these folders."""
    with tempfile.TemporaryDirectory() as blobs:
        check_size([pack(Path(folder), Path(blobs), epoch()) for folder in arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
