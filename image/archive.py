"""Writes the image as an archive, without a container engine and without a registry.

The archive is an OCI image layout in a tar file, which `ctr images import`, `podman load`, `docker load` (from version
25) and `skopeo copy oci-archive:…` read. We know of no library that writes one without a registry.
"""

import argparse
import hashlib
import io
import json
import platform
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image.environment import LIBRARY_TIME, find_commit, make_libraries, make_mgpu
from image.layers import Layer, check_size, compress, epoch, pack

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
CONFIG = {"User": "65532:65532", "Entrypoint": ["mgpu"], "Cmd": ["--help"]}
"""What the last stage of the Dockerfile also sets."""
VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OCI = "application/vnd.oci.image"


class Blobs:
    """The blobs of an OCI image layout, as files in a folder that have their digests as names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, content: bytes) -> str:
        """Store a blob, and return its digest, which begins with `sha256:`."""
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / digest).write_bytes(content)
        return f"sha256:{digest}"

    def add_json(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Store a document, and return the descriptor that refers to it.

        Args:
            kind: the part of its media type after `application/vnd.oci.image`, such as `manifest`.
        """
        content = json.dumps(value, sort_keys=True).encode()
        return {"mediaType": f"{_OCI}.{kind}.v1+json", "digest": self.add(content), "size": len(content)}

    def path(self, digest: str) -> Path:
        return self.folder / digest.removeprefix("sha256:")


class Base:
    """The base image: an OCI image layout in a folder, or a tar file with all files of the root file system.

    Attributes:
        config: its configuration, as the OCI image specification defines it.
        layers: the descriptors of its layers.
        digest: the digest of its manifest, or of the tar file.

    Raises:
        SystemExit: a blob of the layout has other bytes than its digest says.
    """

    def __init__(self, path: Path, blobs: Blobs) -> None:
        if not path.is_dir():
            with path.open("rb") as file:
                self.digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
                file.seek(0)
                layer = compress(file, blobs.folder)
            self.layers = [describe(layer)]
            self.config: Mapping[str, Any] = {"rootfs": {"diff_ids": [f"sha256:{layer.diff_id}"]}}
            return
        found = json.loads((path / "index.json").read_bytes())
        self.digest = ""
        while "manifests" in found:  # an image for several architectures has an index of its own
            self.digest = next(one["digest"] for one in found["manifests"] if _is_for_this_machine(one))
            found = json.loads(_read_blob(path, self.digest))
        self.config = json.loads(_read_blob(path, found["config"]["digest"]))
        self.layers = found["layers"]
        for one in self.layers:
            blobs.add(_read_blob(path, one["digest"]))


def _is_for_this_machine(manifest: Mapping[str, Any]) -> bool:
    found = {"os": "linux", "architecture": ARCHITECTURE} | manifest.get("platform", {})
    return (found["os"], found["architecture"]) == ("linux", ARCHITECTURE)


def _read_blob(layout: Path, digest: str) -> bytes:
    content = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise SystemExit(f"{layout}: the blob {digest} has other bytes")
    return content


def describe(layer: Layer) -> dict[str, Any]:
    """Return the descriptor that refers to a layer."""
    return {"mediaType": f"{_OCI}.layer.v1.tar+gzip", "digest": f"sha256:{layer.digest}", "size": layer.size}


def check_base(base: Base, blobs: Blobs, interpreter: str) -> None:
    """Raise SystemExit if the base image has no Python at this path, or no C++ runtime library."""
    names: set[str] = set()
    for layer in base.layers:
        with tarfile.open(blobs.path(layer["digest"])) as tar:
            names |= {name.removeprefix("./") for name in tar.getnames()}
    if interpreter.lstrip("/") not in names:
        raise SystemExit(f"the base image has no {interpreter}")
    if not any(name.endswith("/libstdc++.so.6") for name in names):
        raise SystemExit("the base image has no libstdc++.so.6, which grpc and numpy need")


def write_archive(base: Base, layers: Sequence[Layer], blobs: Blobs, name: str, commit: str, target: Path) -> None:
    """Write the archive with the base image and the layers, whose blobs are there already."""
    variables = dict(entry.split("=", 1) for entry in base.config.get("config", {}).get("Env", []))
    variables |= {**VARIABLES, "PATH": f"/opt/mgpu/bin:{variables.get('PATH', _PATH)}"}
    labels = {"org.opencontainers.image.revision": commit, "org.opencontainers.image.base.digest": base.digest}
    env = [f"{key}={value}" for key, value in variables.items()]
    config: dict[str, Any] = {"architecture": ARCHITECTURE, "os": "linux", "config": {**CONFIG, "Env": env}}
    config["config"]["Labels"] = labels
    config["created"] = datetime.fromtimestamp(epoch(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    diff_ids = [*base.config["rootfs"]["diff_ids"], *(f"sha256:{layer.diff_id}" for layer in layers)]
    config["rootfs"] = {"type": "layers", "diff_ids": diff_ids}
    manifest: dict[str, Any] = {"schemaVersion": 2, "mediaType": f"{_OCI}.manifest.v1+json"}
    manifest["config"] = blobs.add_json("config", config)
    manifest["layers"] = [*base.layers, *map(describe, layers)]
    image = blobs.add_json("manifest", manifest)
    image["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    index = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": [image]}
    files = {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": index}
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for path, document in files.items():
            _add(tar, path, json.dumps(document, sort_keys=True).encode())
        for blob in sorted(blobs.folder.iterdir()):
            _add(tar, f"blobs/sha256/{blob.name}", blob.read_bytes())
    print(f"{target}: {name}, manifest {image['digest']}")
    for layer in manifest["layers"]:
        print(f"  {layer['size'] / 1e6:5.1f} MB  {layer['digest']}")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mtime = epoch()
    tar.addfile(entry, io.BytesIO(content))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m image.archive", description=__doc__)
    parser.add_argument("base", type=Path, help="the base image: an OCI image layout, or a tar file of its files")
    parser.add_argument("target", type=Path, help="the tar file to write")
    parser.add_argument("--name", default="mgpu:latest", help="name and tag of the image")
    parser.add_argument("--interpreter", required=True, help="the path of Python in the base image")
    given = parser.parse_args(arguments)
    commit = find_commit()
    with tempfile.TemporaryDirectory() as folder:
        blobs = Blobs(Path(folder, "blobs"))
        blobs.folder.mkdir()
        base = Base(given.base, blobs)
        check_base(base, blobs, given.interpreter)
        make_libraries(Path(folder, "libraries"), given.interpreter)
        make_mgpu(Path(folder, "mgpu"), commit)
        layers = [
            pack(Path(folder, "libraries"), blobs.folder, LIBRARY_TIME),
            pack(Path(folder, "mgpu"), blobs.folder, epoch()),
        ]
        check_size(layers)
        write_archive(base, layers, blobs, given.name, commit, given.target)


if __name__ == "__main__":
    main(sys.argv[1:])
