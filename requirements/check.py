"""Check that the locked versions satisfy pyproject.toml, without a network: `make check` runs it, `make lock` mends.

What is checked: each requirement of an extra, and of what it requires in turn, is pinned in its file by a version that
satisfies it; each pin has hashes; the files agree with one another; and no file names a registry.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES: Mapping[str, tuple[str, ...]] = {"runtime": (), "demo": ("playground",), "dev": ("dev",)}
"""File → the extras of mgpu that it locks."""
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;]+)(?: ; (.*?))?((?: --hash=sha256:[0-9a-f]{64})*)")


def pins(text: str) -> Iterator[tuple[Requirement, str, bool]]:
    """Yield name and marker, version, and whether there are hashes, of each line of a requirements file."""
    lines = (line for line in text.replace("\\\n", " ").splitlines() if line and not line.lstrip().startswith("#"))
    for line in lines:
        match = _PIN.fullmatch(" ".join(line.split()))
        if match is None:
            raise ValueError(f"not a pinned version with hashes: {line[:80]}")
        name, version, marker, hashes = match.groups()
        yield Requirement(f"{name} ; {marker}" if marker else name), version, bool(hashes)


def problems(pyproject: str, locks: Mapping[str, str]) -> list[str]:
    """Return what is wrong. locks: the text of each of FILES."""
    project = tomllib.loads(pyproject)["project"]
    found: list[str] = []
    everything: dict[tuple[str, str], str] = {}
    for file, extras in FILES.items():
        here: dict[str, str] = {}
        for requirement, version, hashed in pins(locks[file]):
            name = canonicalize_name(requirement.name)
            if not hashed:
                found.append(f"requirements/{file}.txt: {name} has no hash")
            if everything.setdefault((name, str(requirement.marker)), version) != version:
                found.append(f"requirements/{file}.txt: {name} is locked in another version than in another file")
            if requirement.marker is None or requirement.marker.evaluate():
                here[name] = version
        found += (f"requirements/{file}.txt: {text}" for text in _unmet(project, extras, here))
    return found


def _unmet(project: Mapping[str, object], extras: tuple[str, ...], locked: Mapping[str, str]) -> Iterator[str]:
    """Yield what is required here, directly or by what is installed, and is not locked so."""
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
    """Yield what an installed distribution requires, with the extras of it that are asked for."""
    try:
        texts = requires(requirement.name) or []
    except PackageNotFoundError:
        return  # of an extra that is not installed here; its own requirements were locked with it
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
        f"{path.name} names a registry; versions and hashes are enough"
        for path in sorted(here.glob("*.txt"))
        if "://" in path.read_text()
    )
    for text in found:
        print(text, file=sys.stderr)
    if found:
        print("the locked versions are out of date: run `make lock`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
