import tarfile
from pathlib import Path

import pytest

from image import layers
from image.layers import Layer


def make_folder(folder: Path) -> Path:
    (folder / "opt/mgpu").mkdir(parents=True)
    (folder / "opt/mgpu/program").write_text("x")
    (folder / "opt/mgpu/program").chmod(0o755)
    (folder / "opt/mgpu/link").symlink_to("/usr/bin/python3")
    return folder


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    folder = tmp_path / "blobs"
    folder.mkdir()
    return folder


def test_layer_has_the_files_of_root_at_the_given_time(tmp_path: Path, blobs: Path) -> None:
    layer = layers.pack(make_folder(tmp_path / "one"), blobs, 1700000000)
    with tarfile.open(blobs / layer.digest) as tar:
        found = {entry.name: entry for entry in tar.getmembers()}
    assert list(found) == ["opt", "opt/mgpu", "opt/mgpu/link", "opt/mgpu/program"]
    assert {(entry.uid, entry.gid, entry.uname, entry.mtime) for entry in found.values()} == {(0, 0, "", 1700000000)}
    assert found["opt/mgpu/program"].mode == 0o755
    assert found["opt/mgpu/link"].linkname == "/usr/bin/python3"


def test_equal_folders_make_equal_layers(tmp_path: Path, blobs: Path) -> None:
    first = layers.pack(make_folder(tmp_path / "one"), blobs, 1)
    assert layers.pack(make_folder(tmp_path / "another name"), blobs, 1) == first


def test_layer_larger_than_the_limit_is_refused() -> None:
    half = Layer("", "", layers.MOST_BYTES // 2)
    layers.check_size([half, half])
    with pytest.raises(SystemExit, match="may have 70 MB"):
        layers.check_size([half, half, Layer("", "", 2)])
