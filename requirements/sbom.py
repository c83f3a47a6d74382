"""Writes the bill of materials of the image's libraries (CycloneDX), and the table of their licences.

Both are made from requirements/runtime.txt without the libraries that the image leaves out. The packages of the base
image are not in it; scanners read those from the image.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from image.environment import find_commit
from image.layers import epoch
from requirements.licences import Library, problems, read_libraries, table

ROOT = Path(__file__).parents[1]


def make_bom(libraries: Sequence[Library], version: str, commit: str) -> Bom:
    """Return the bill of materials. It depends only on the arguments, pyproject.toml and SOURCE_DATE_EPOCH."""
    own = Component(
        name="mgpu", version=version, type=ComponentType.APPLICATION, bom_ref="mgpu", description=f"commit {commit}"
    )
    components = {one.name: _component(one) for one in libraries}
    bom = Bom(components=components.values(), serial_number=uuid5(NAMESPACE_URL, f"mgpu {version} {commit}"))
    bom.metadata.component = own
    bom.metadata.timestamp = datetime.fromtimestamp(epoch(), UTC)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = {canonicalize_name(Requirement(text).name) for text in needed}
    bom.register_dependency(own, [component for name, component in components.items() if name in direct])
    for one in libraries:
        bom.register_dependency(components[one.name], [components[name] for name in one.needs if name in components])
    return bom


def _component(library: Library) -> Component:
    purl = PackageURL("pypi", name=library.name, version=library.version)
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=content) for content in library.hashes]
    wheels = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(str(purl)),
        comment="one wheel for each platform; the index is that of pip's own settings",
        hashes=hashes,
    )
    return Component(
        name=library.name,
        version=library.version,
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        licenses=[LicenseExpression(library.licence)],
        external_references=[wheels],
    )


def _python() -> str:
    """Return the version of Python in the base image that the Dockerfile names."""
    (found,) = re.findall(r"^ARG BASE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return str(found)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m requirements.sbom", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write mgpu.cdx.json and licences.md")
    parser.add_argument("--python", default=_python(), help="the version of Python in the image")
    given = parser.parse_args(arguments)
    libraries = list(read_libraries((ROOT / "requirements/runtime.txt").read_text(), given.python))
    found = problems(libraries)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    bom = make_bom(libraries, version, find_commit())
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "mgpu.cdx.json").write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    (given.folder / "licences.md").write_text(table(libraries))
    print(f"{given.folder}: {len(libraries)} libraries in mgpu.cdx.json and licences.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
