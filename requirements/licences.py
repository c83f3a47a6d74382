"""Checks that the licences of all libraries in the image are on a short list.

The licences are those that the libraries declare in their metadata, so the check needs the installed libraries, and no
network.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import metadata, requires
from pathlib import Path

from license_expression import AND, OR, ExpressionError, LicenseExpression, get_spdx_licensing
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from image.contents import UNUSED_LIBRARIES
from requirements.check import pins

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD-3-Clause-Open-MPI",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "PSF-2.0",
    "Zlib",
    # Runtime libraries of GCC in numpy's wheels: shared libraries of their own, unchanged.
    "GPL-3.0-or-later WITH GCC-exception-3.1",
    "LGPL-2.1-or-later",
}
_LICENCE_FILES = {
    "blinker": "MIT",
    "itsdangerous": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "markdown-it-py": "MIT",
    "mdurl": "MIT",
    "nvidia-ml-py": "BSD-3-Clause",
    "protobuf": "BSD-3-Clause",
}
"""What the licence files of libraries say whose metadata has no SPDX expression."""
_BUNDLED = {"numpy": "BSD-3-Clause-Open-MPI AND GPL-3.0-or-later WITH GCC-exception-3.1 AND LGPL-2.1-or-later"}
"""The licences of what a wheel contains besides the library, where its licence file has more than its metadata."""
_SPDX = get_spdx_licensing()


@dataclass(frozen=True, slots=True)
class Library:
    """A library in the image.

    Attributes:
        licence: an SPDX expression; "" if it is unknown.
        needs: the canonical names of the libraries that it requires directly.
        hashes: the SHA-256 hashes of its wheels that the lock file allows.
    """

    name: str
    version: str
    licence: str
    needs: tuple[str, ...]
    hashes: tuple[str, ...]


def read_libraries(lock: str, python: str) -> Iterator[Library]:
    """Yield the libraries of requirements/runtime.txt that the image contains.

    Args:
        lock: the text of the lock file.
        python: the version of Python in the image, such as `3.13`.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for requirement, version, hashes in pins(lock):
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if applies and name not in UNUSED_LIBRARIES:
            needed = [Requirement(text) for text in requires(name) or []]
            needs = {
                canonicalize_name(one.name)
                for one in needed
                if one.marker is None or one.marker.evaluate({**environment, "extra": ""})
            }
            yield Library(name, version, _read_licence(name), tuple(sorted(needs)), hashes)


def _read_licence(name: str) -> str:
    """Return the licence of an installed library with what its wheel bundles, as an SPDX expression; "" if unknown."""
    found = metadata(name).json
    declared = _parse(str(found.get("license_expression") or found.get("license") or ""))
    if declared is None:
        declared = _parse(_LICENCE_FILES.get(name, ""))
    bundled = _parse(_BUNDLED.get(name, ""))
    parts = [part for part in (declared, bundled) if part is not None]
    return " AND ".join(f"({part})" if isinstance(part, OR) and bundled is not None else str(part) for part in parts)


def _parse(text: str) -> LicenseExpression | None:
    """Return an SPDX expression; None if the text is empty or is none."""
    try:
        return _SPDX.parse(text, validate=True)
    except ExpressionError:
        return None


def is_allowed(licence: str) -> bool:
    """Return whether mgpu may be distributed with a library under this licence, an SPDX expression."""
    parsed = _parse(licence)
    return parsed is not None and _allows(parsed)


def _allows(parsed: LicenseExpression) -> bool:
    if isinstance(parsed, AND):
        return all(map(_allows, parsed.args))
    if isinstance(parsed, OR):
        return any(map(_allows, parsed.args))
    return str(parsed) in ALLOWED


def problems(libraries: Iterable[Library]) -> list[str]:
    """Return a message for each library whose licence is not allowed or not known."""
    return [
        f"{one.name} {one.version}: the licence {one.licence or 'is unknown and'} is not in requirements/licences.py"
        for one in libraries
        if not is_allowed(one.licence)
    ]


def table(libraries: Iterable[Library]) -> str:
    """Return a table in Markdown with the version and the licence of each library."""
    rows = [f"| {one.name} | {one.version} | {one.licence} |" for one in libraries]
    return "\n".join(["| library | version | licence |", "|---|---|---|", *rows]) + "\n"


def main() -> int:
    lock = (Path(__file__).parent / "runtime.txt").read_text()
    found = problems(read_libraries(lock, f"{sys.version_info.major}.{sys.version_info.minor}"))
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
