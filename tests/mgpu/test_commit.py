import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mgpu import commit

ROOT = Path(commit.__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_commit_of_checkout_is_abbreviated(checkout: Path) -> None:
    assert commit.read_commit(checkout) == git(checkout, "rev-parse", "--short=12", "HEAD")


def test_tag_does_not_hide_the_commit(checkout: Path) -> None:
    git(checkout, "tag", "-a", "v1", "-m", "one")
    assert commit.read_commit(checkout) == git(checkout, "rev-parse", "--short=12", "HEAD")


def test_changed_checkout_is_dirty(checkout: Path) -> None:
    (checkout / "file").write_text("2")
    assert commit.read_commit(checkout) == git(checkout, "rev-parse", "--short=12", "HEAD") + "-dirty"


def test_sources_inside_another_checkout_have_no_commit(checkout: Path) -> None:
    inner = checkout / "vendor/mgpu"
    inner.mkdir(parents=True)
    assert commit.read_commit(inner) is None


def test_without_git_the_commit_is_unknown(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit.read_commit(checkout) is None


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What a build needs of mgpu's sources, without git and without the other packages."""
    folder = tmp_path / "sources"
    shutil.copytree(ROOT / "mgpu", folder / "mgpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize(
    ("variable", "shown"),
    [("0123456789ab", "commit 0123456789ab"), ("", "commit unknown")],
    ids=["told", "neither told nor a checkout"],
)
def test_build_writes_the_commit_that_the_option_shows(
    sources: Path, tmp_path: Path, variable: str, shown: str
) -> None:
    environment = {**os.environ, commit.VARIABLE: variable}
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    subprocess.run(command, cwd=sources, env=environment, capture_output=True, timeout=120, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "from mgpu.cli.main import main; main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "installed", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith(f" ({shown})")
