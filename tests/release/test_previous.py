"""Which release precedes a commit."""

import subprocess
from pathlib import Path

import pytest

from release.previous import UnknownReleaseError, previous_release


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "tag.gpgSign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, message: str = "change") -> None:
    git(folder, "commit", "--allow-empty", "--no-gpg-sign", "--no-verify", "-m", message)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits on the branch main."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--initial-branch=main")
    commit(folder)
    commit(folder)
    return folder


def test_release_among_the_ancestors_is_found(repository: Path) -> None:
    git(repository, "tag", "v0.1.0")
    commit(repository)
    assert previous_release(repository, is_shallow_refused=True) == "v0.1.0"


def test_nothing_precedes_the_first_release(repository: Path) -> None:
    git(repository, "tag", "other")
    assert previous_release(repository, is_shallow_refused=True) is None
    git(repository, "tag", "v0.1.0")
    assert previous_release(repository, is_shallow_refused=True) is None


def test_nothing_precedes_a_commit_before_the_first_release(repository: Path) -> None:
    git(repository, "tag", "v0.1.0")
    git(repository, "checkout", "HEAD^")
    assert previous_release(repository, is_shallow_refused=True) is None


def test_release_on_another_branch_is_an_error(repository: Path) -> None:
    git(repository, "checkout", "-b", "other")
    commit(repository, "release")
    git(repository, "tag", "v0.1.0")
    git(repository, "checkout", "main")
    commit(repository)
    with pytest.raises(UnknownReleaseError, match=r"but there is v0\.1\.0"):
        previous_release(repository, is_shallow_refused=False)


def test_shallow_clone_is_an_error_only_for_a_release(repository: Path, tmp_path: Path) -> None:
    git(repository, "tag", "v0.1.0", "HEAD^")
    git(tmp_path, "clone", "--depth=1", repository.as_uri(), "shallow")
    assert previous_release(tmp_path / "shallow", is_shallow_refused=False) is None
    with pytest.raises(UnknownReleaseError, match="--unshallow"):
        previous_release(tmp_path / "shallow", is_shallow_refused=True)
