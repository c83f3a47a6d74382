"""Checks that a commit can be released: everything that names a version names the same, and the changelog describes it.

    python -m release.check

It prints each problem in a line of its own, and exits with code 1 if there is one.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGELOG = "CHANGELOG.md"
VERSIONS: Mapping[str, str] = {
    "manifests/base/kustomization.yaml": r'app\.kubernetes\.io/version: "(.*?)"|newTag: "(.*?)"',
    "manifests/components/slices/kustomization.yaml": r'newTag: "(.*?)"',
    "manifests/overlays/example/kustomization.yaml": r'images\.example/mgpu, newTag: "(.*?)"',
    "manifests/chart/mgpu/Chart.yaml": r"^(?:version|appVersion): (.*)$",
    "krew/mgpu.yaml": r"^  version: v(.*)$",
}
"""The files that name the version besides pyproject.toml, each with a pattern that finds it."""
_RELEASE = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""Without pre-releases: a wheel has the version 1.0.0rc1 where Helm and Krew need 1.0.0-rc.1."""
_HEADING = re.compile(r"^## \[(.+?)\](?: - (.+))?$", re.MULTILINE)


def version_of(pyproject: str) -> str:
    """Return the version in the text of pyproject.toml."""
    return str(tomllib.loads(pyproject)["project"]["version"])


def version_problems(version: str, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each file that does not name this version.

    Args:
        version: The version in pyproject.toml.
        files: The texts of the files in VERSIONS, by path.
    """
    if not _RELEASE.fullmatch(version):
        yield f"pyproject.toml: version {version!r} is not MAJOR.MINOR.PATCH"
    for path, pattern in VERSIONS.items():
        found = ["".join(match.groups(default="")) for match in re.finditer(pattern, files[path], re.MULTILINE)]
        if not found:
            yield f"{path}: names no version"
        yield from (f"{path}: names version {other}, not {version}" for other in found if other != version)


def changelog_problems(version: str, text: str, today: date) -> Iterator[str]:
    """Yield a message for each reason why the changelog does not describe this version as released by today."""
    headings = list(_HEADING.finditer(text))
    names = [heading[1] for heading in headings]
    if names[:1] != ["Unreleased"]:
        yield f"{CHANGELOG}: the first section is not [Unreleased]"
    elif len(headings) > 1 and text[headings[0].end() : headings[1].start()].strip():
        yield f"{CHANGELOG}: [Unreleased] is not empty: move what it says to [{version}]"
    if version not in names:
        yield f"{CHANGELOG}: has no section [{version}]"
        return
    try:
        released = date.fromisoformat(headings[names.index(version)][2] or "")
    except ValueError:
        yield f"{CHANGELOG}: the heading of [{version}] is not `## [{version}] - YYYY-MM-DD`"
    else:
        if released > today:
            yield f"{CHANGELOG}: [{version}] has the date {released}, which is in the future"


def git_problems(version: str, status: str, head: str, tagged: str) -> Iterator[str]:
    """Yield a message for each reason why this checkout is not the commit of the version.

    Args:
        status: The output of `git status --porcelain`.
        head: The commit that is checked out.
        tagged: The commit of the tag `vVERSION`, or "" if there is no such tag.
    """
    if status:
        yield "the checkout has changes that are not committed"
    if tagged and tagged != head:
        yield f"the tag v{version} is already on another commit, {tagged[:12]}: a version is released once"


def problems() -> list[str]:
    """Return a message for each reason why this checkout cannot be released."""
    version = version_of((ROOT / "pyproject.toml").read_text())
    files = {path: (ROOT / path).read_text() for path in VERSIONS}
    return [
        *version_problems(version, files),
        *changelog_problems(version, (ROOT / CHANGELOG).read_text(), datetime.now(UTC).date()),
        *git_problems(version, _git("status", "--porcelain"), _git("rev-parse", "HEAD"), _tagged(version)),
    ]


def _tagged(version: str) -> str:
    """Return the commit of the tag of this version, also if the tag is an object of its own; "" if there is none."""
    return _git(
        "for-each-ref",
        "--format=%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end)",
        f"refs/tags/v{version}",
    )


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    found = problems()
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
