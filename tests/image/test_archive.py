"""The archive, with small folders instead of the real layers."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from image import layers
from image.archive import ARCHITECTURE, Base, Blobs, check_base, write_archive

INTERPRETER = "/usr/bin/python3.11"


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(make_folder(tmp_path / "blobs"))


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def root_tar(target: Path, *names: str) -> Path:
    with tarfile.open(target, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return target


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return root_tar(tmp_path / "root.tar", "./usr/bin/python3.11", "./usr/lib/x86_64-linux-gnu/libstdc++.so.6")


def write(base: Path, blobs: Blobs, tmp_path: Path) -> Path:
    folder = make_folder(tmp_path / "files")
    (folder / "mgpu").write_text("1")
    found = Base(base, blobs)
    write_archive(found, [layers.pack(folder, blobs.folder, 1)], blobs, "mgpu:1", "0123", tmp_path / "image.tar")
    return tmp_path / "image.tar"


def read(image: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    """Return the manifest, the configuration and all files of an archive."""
    with tarfile.open(image) as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    (index,) = json.loads(files["index.json"])["manifests"]
    assert index["annotations"]["io.containerd.image.name"] == "mgpu:1"
    manifest = json.loads(files[f"blobs/{index['digest'].replace(':', '/')}"])
    return manifest, json.loads(files[f"blobs/{manifest['config']['digest'].replace(':', '/')}"]), files


def test_archive_has_all_blobs_that_it_names(root: Path, blobs: Blobs, tmp_path: Path) -> None:
    manifest, config, files = read(write(root, blobs, tmp_path))
    assert len(manifest["layers"]) == len(config["rootfs"]["diff_ids"]) == 2
    for one in (manifest["config"], *manifest["layers"]):
        assert len(files[f"blobs/{one['digest'].replace(':', '/')}"]) == one["size"]


def test_image_runs_mgpu_as_a_user_without_rights(root: Path, blobs: Blobs, tmp_path: Path) -> None:
    _, config, _ = read(write(root, blobs, tmp_path))
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["Entrypoint"] == ["mgpu"]
    (path,) = (entry for entry in config["config"]["Env"] if entry.startswith("PATH="))
    assert path.startswith("PATH=/opt/mgpu/bin:/usr/local/sbin:")
    assert config["config"]["Labels"]["org.opencontainers.image.revision"] == "0123"


def test_base_in_a_layout_keeps_its_layers_and_variables(root: Path, blobs: Blobs, tmp_path: Path) -> None:
    layout = make_folder(tmp_path / "layout")
    stored = Blobs(make_folder(layout / "blobs") / "sha256")
    stored.folder.mkdir()
    with root.open("rb") as file:
        layer = layers.compress(file, stored.folder)
    config = {"config": {"Env": ["LANG=C.UTF-8", "PATH=/own"]}, "rootfs": {"diff_ids": [f"sha256:{layer.diff_id}"]}}
    described = {"digest": f"sha256:{layer.digest}", "size": layer.size, "mediaType": "layer"}
    manifest = stored.add_json("manifest", {"config": stored.add_json("config", config), "layers": [described]})
    other = {**manifest, "digest": "sha256:0", "platform": {"os": "linux", "architecture": "other"}}
    own = {**manifest, "platform": {"os": "linux", "architecture": ARCHITECTURE}}
    index = stored.add_json("index", {"manifests": [other, own]})
    (layout / "index.json").write_text(json.dumps({"manifests": [index]}))

    written, found, _ = read(write(layout, blobs, tmp_path))
    assert written["layers"][0] == described
    assert found["rootfs"]["diff_ids"][0] == f"sha256:{layer.diff_id}"
    assert {"LANG=C.UTF-8", "PATH=/opt/mgpu/bin:/own"} <= set(found["config"]["Env"])
    assert found["config"]["Labels"]["org.opencontainers.image.base.digest"] == manifest["digest"]


def test_damaged_layout_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    layout = make_folder(tmp_path / "layout")
    stored = Blobs(make_folder(layout / "blobs") / "sha256")
    stored.folder.mkdir()
    manifest = stored.add_json("manifest", {})
    stored.path(manifest["digest"]).write_text("{ }")
    (layout / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    with pytest.raises(SystemExit, match="has other bytes"):
        Base(layout, blobs)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["./usr/lib/libstdc++.so.6"], "has no /usr/bin/python3.11"),
        (["./usr/bin/python3.11"], "has no libstdc"),
    ],
)
def test_base_without_what_mgpu_needs_is_refused(names: list[str], why: str, blobs: Blobs, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=why):
        check_base(Base(root_tar(tmp_path / "root.tar", *names), blobs), blobs, INTERPRETER)


def test_base_with_what_mgpu_needs_is_accepted(root: Path, blobs: Blobs) -> None:
    check_base(Base(root, blobs), blobs, INTERPRETER)


def test_equal_images_are_equal_archives(root: Path, blobs: Blobs, tmp_path: Path) -> None:
    first = write(root, blobs, tmp_path).read_bytes()
    other = make_folder(tmp_path / "other")
    assert write(root, Blobs(make_folder(other / "blobs")), other).read_bytes() == first
