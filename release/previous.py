"""Finds the release before a commit, with which the test of the version skew runs (docs/versioning.md)."""

import subprocess
from pathlib import Path

_TAGS = "v*"


class UnknownReleaseError(Exception):
    """There may be a release before the commit, but this repository does not show which."""


def previous_release(repository: Path, *, is_shallow_refused: bool) -> str | None:
    """Return the last tag `v…` among the ancestors of HEAD, or None if nothing was released before HEAD.

    Args:
        is_shallow_refused: whether a shallow clone, which may lack the ancestors and their tags, is an error.

    Raises:
        UnknownReleaseError: there are tags, of which none is among the ancestors, or the clone is shallow.
    """
    found = _git(repository, "describe", "--tags", "--abbrev=0", f"--match={_TAGS}", "HEAD^")
    if found:
        return found
    if _git(repository, "rev-parse", "--is-shallow-repository") == "true":
        if is_shallow_refused:
            raise UnknownReleaseError("the clone is shallow: run git fetch --unshallow --tags")
        return None
    # Tags that contain HEAD are of later releases, or of HEAD itself.
    tags = (_git(repository, "tag", "--list", _TAGS, "--no-contains=HEAD") or "").split()
    if tags:
        raise UnknownReleaseError(f"no tag v… is among the ancestors of this commit, but there is {tags[-1]}")
    return None


def _git(repository: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
