import subprocess
import sys
from pathlib import Path

import pytest

from image import environment
from image.contents import PACKAGES
from mgpu.version import own_version


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "layer"
    environment.make_mgpu(folder, "0123456789ab")
    return folder


def contents(folder: Path) -> dict[str, bytes | str | None]:
    return {
        path.relative_to(folder).as_posix(): (
            str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in folder.rglob("*")
    }


def test_layer_has_the_packages_and_programs_of_mgpu_alone(layer: Path) -> None:
    folder = layer / environment.PLACE
    packages = folder / f"lib/{environment.PYTHON}/site-packages"
    names = {path.name for path in packages.iterdir()}
    assert names == {*PACKAGES, f"mgpu-{own_version()}.dist-info"}
    assert {"mgpu", "kubectl-mgpu"} <= {path.name for path in (folder / "bin").iterdir()}
    assert {path.name for path in folder.iterdir()} == {"bin", "lib"}
    assert (packages / f"mgpu/__pycache__/version.{sys.implementation.cache_tag}.pyc").exists()


def test_program_names_the_commit(layer: Path) -> None:
    packages = layer / environment.PLACE / f"lib/{environment.PYTHON}/site-packages"
    code = "from mgpu.commit import describe_build; print(describe_build())"
    done = subprocess.run([sys.executable, "-c", code], cwd=packages, capture_output=True, text=True, check=True)
    assert done.stdout == "commit 0123456789ab\n"


def test_two_builds_make_the_same_files(layer: Path, tmp_path: Path) -> None:
    environment.make_mgpu(tmp_path / "other", "0123456789ab")
    assert contents(tmp_path / "other") == contents(layer)


def test_libraries_for_another_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not python3"):
        environment.make_libraries(tmp_path / "layer", "/usr/bin/python2.7")
