"""The archive and the manifest for Krew, by the rules that Krew checks (`pkg/index/validation` of its sources)."""

import hashlib
import io
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from krew.package import MANIFEST, ROOT, fill_manifest, make_archive, package

VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
URI = "https://downloads.test/mgpu"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / f"mgpu-{VERSION}-py3-none-any.whl"
    path.write_bytes(b"a wheel")
    return path


def check(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert manifest["kind"] == "Plugin"
    assert re.fullmatch(r"[\w-]+", manifest["metadata"]["name"])
    spec = manifest["spec"]
    assert spec.keys() <= {"version", "shortDescription", "description", "caveats", "homepage", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", spec["version"])
    assert spec["shortDescription"]
    assert "\n" not in spec["shortDescription"]
    assert spec["platforms"]
    for platform in spec["platforms"]:
        assert platform.keys() == {"selector", "uri", "sha256", "files", "bin"}
        assert re.fullmatch(r"[0-9a-f]{64}", platform["sha256"])
        assert platform["uri"].startswith("https://")
        assert platform["selector"].keys() == {"matchLabels"}
        assert all(not Path(row[key]).is_absolute() for row in platform["files"] for key in ("from", "to"))
    chosen = [tuple(sorted(platform["selector"]["matchLabels"].items())) for platform in spec["platforms"]]
    assert len(set(chosen)) == len(chosen)


def test_manifest_of_the_checkout_is_valid_and_has_its_version() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    check(manifest)
    assert manifest["spec"]["version"] == f"v{VERSION}"


def test_release_has_the_checksum_and_the_address_of_its_archive(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    manifest = yaml.safe_load(package(tmp_path / "dist", f"{URI}/", wheel).read_text())
    check(manifest)
    archive = tmp_path / "dist" / f"mgpu-krew-v{VERSION}.tar.gz"
    for platform in manifest["spec"]["platforms"]:
        assert platform["uri"] == f"{URI}/{archive.name}"
        assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    with tarfile.open(archive) as files:
        names = files.getnames()
        assert names == ["LICENSE", "kubectl-mgpu", wheel.name, "requirements.txt"]
        assert files.getmember("kubectl-mgpu").mode == 0o755
    assert all(platform["bin"] in names for platform in manifest["spec"]["platforms"])


def test_archive_of_the_same_wheel_is_the_same(wheel: Path) -> None:
    first = make_archive(wheel, 1_700_000_000)
    assert first == make_archive(wheel, 1_700_000_000)
    with tarfile.open(fileobj=io.BytesIO(first)) as files:
        assert {(row.mtime, row.uid, row.uname) for row in files} == {(1_700_000_000, 0, "")}


def test_wheel_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a wheel of version"):
        package(tmp_path, URI, tmp_path / "mgpu-99.0-py3-none-any.whl")


def test_filled_manifest_differs_only_in_the_release() -> None:
    text = MANIFEST.read_text()
    before, after = yaml.safe_load(text), yaml.safe_load(fill_manifest(text, "9.8.7", URI, "f" * 64))
    assert after["spec"].pop("version") == "v9.8.7"
    del before["spec"]["version"]
    for platform in (*before["spec"]["platforms"], *after["spec"]["platforms"]):
        del platform["uri"], platform["sha256"]
    assert before == after
