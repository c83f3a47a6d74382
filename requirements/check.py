"""Checks without a network that the locked versions satisfy pyproject.toml. `make lock` corrects the lock files.

Each lock file must pin a version, with hashes, for every direct and indirect requirement of mgpu and of the file's
extras. All lock files must pin the same version of a library. No file may contain the URL of a registry: versions and
hashes identify a library.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES: Mapping[str, tuple[str, ...]] = {"runtime": (), "demo": ("playground",), "docs": ("docs",), "dev": ("dev",)}
"""The lock files by name, each with the extras of mgpu whose requirements it locks."""
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;]+)(?: ; (.*?))?((?: --hash=sha256:[0-9a-f]{64})*)")
_HASH = re.compile(r"sha256:(\w+)")


def pins(text: str) -> Iterator[tuple[Requirement, str, tuple[str, ...]]]:
    """Yield the requirement (name and marker), the version and the SHA-256 hashes for each pin of a lock file.

    Raises ValueError if a line is neither a comment nor a pin.
    """
    lines = (line for line in text.replace("\\\n", " ").splitlines() if line and not line.lstrip().startswith("#"))
    for line in lines:
        match = _PIN.fullmatch(" ".join(line.split()))
        if match is None:
            raise ValueError(f"not a pinned version with hashes: {line[:80]}")
        name, version, marker, hashes = match.groups()
        yield Requirement(f"{name} ; {marker}" if marker else name), version, tuple(_HASH.findall(hashes))


def problems(pyproject: str, locks: Mapping[str, str]) -> list[str]:
    """Return a message for each problem. Raises ValueError if a line of a lock file is malformed.

    Args:
        pyproject: The text of pyproject.toml.
        locks: The text of each lock file, by the names in FILES.
    """
    project = tomllib.loads(pyproject)["project"]
    found: list[str] = []
    everything: dict[tuple[str, str], str] = {}
    for file, extras in FILES.items():
        here: dict[str, str] = {}
        for requirement, version, hashes in pins(locks[file]):
            name = canonicalize_name(requirement.name)
            if not hashes:
                found.append(f"requirements/{file}.txt: {name} has no hash")
            if everything.setdefault((name, str(requirement.marker)), version) != version:
                found.append(f"requirements/{file}.txt: the version of {name} differs from that in another lock file")
            if requirement.marker is None or requirement.marker.evaluate():
                here[name] = version
        found += (f"requirements/{file}.txt: {text}" for text in _unmet(project, extras, here))
    return found


def _unmet(project: Mapping[str, object], extras: tuple[str, ...], locked: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each direct or indirect requirement of the project that the locked versions do not satisfy.

    The requirements of a library are those of its installed version.

    Args:
        project: The table `project` of pyproject.toml.
        extras: The extras of the project that are also required.
        locked: The locked versions, by the canonical names of the libraries.
    """
    waiting = [(Requirement(text), "pyproject.toml") for text in _of_project(project, extras)]
    done: set[str] = set()
    while waiting:
        requirement, by = waiting.pop()
        if str(requirement) in done or not _applies(requirement):
            continue
        done.add(str(requirement))
        name = canonicalize_name(requirement.name)
        if name not in locked:
            yield f"{name}, which {by} requires, is missing"
        elif not requirement.specifier.contains(locked[name], prereleases=True):
            yield f"{name}=={locked[name]} does not satisfy {requirement}, which {by} requires"
        else:
            waiting += ((inner, name) for inner in _required_by(requirement))


def _of_project(project: Mapping[str, object], extras: tuple[str, ...]) -> Iterator[str]:
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    assert isinstance(project["dependencies"], list)
    yield from project["dependencies"]
    for extra in extras:
        for text in optional[extra]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                yield from _of_project({**project, "dependencies": []}, tuple(sorted(requirement.extras)))
            else:
                yield text


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _required_by(requirement: Requirement) -> Iterator[Requirement]:
    """Yield the requirements of an installed library, including those of the extras that `requirement` names."""
    try:
        texts = requires(requirement.name) or []
    except PackageNotFoundError:
        return  # the library is not installed here, so its requirements are unknown
    for text in texts:
        inner = Requirement(text)
        marker = inner.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
            inner.marker = None
            yield inner


def main() -> int:
    here = Path(__file__).parent
    locks = {file: (here / f"{file}.txt").read_text() for file in FILES}
    found = problems((here.parent / "pyproject.toml").read_text(), locks)
    found += (
        f"requirements/{path.name} contains a URL; a lock file must contain only versions and hashes"
        for path in sorted(here.glob("*.txt"))
        if "://" in path.read_text()
    )
    for text in found:
        print(text, file=sys.stderr)
    if found:
        print("the lock files do not satisfy pyproject.toml: run `make lock`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
