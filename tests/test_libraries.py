"""The libraries in pyproject.toml are those that the code imports, and CONTRIBUTING.md gives a reason for each."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = ("mgpu", "webhook", "scheduler", "deviceplugin", "proto")
"""The packages of the image, which has only the libraries of `dependencies`."""
TOOLS = (ROOT / "proto/generate.py",)
"""Modules in these packages that only developers run."""


def names(requirements: list[str]) -> set[str]:
    found: set[str] = {canonicalize_name(Requirement(text).name) for text in requirements}
    return found - {PROJECT["name"]}


RUNTIME = names(PROJECT["dependencies"])
EXTRAS = {extra: names(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}


@cache
def distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def imports(file: Path) -> Iterator[str]:
    """Yield the full name of each module that a file imports, wherever the statement is."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def libraries(*packages: str) -> dict[str, str]:
    """Return the libraries that packages import, each with a file that does."""
    found = {}
    for file in (file for package in packages for file in (ROOT / package).rglob("*.py") if file not in TOOLS):
        for module in imports(file):
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names | {"_typeshed"} and not (ROOT / top).is_dir():
                found[library(module)] = str(file.relative_to(ROOT))
    return found


def library(module: str) -> str:
    """Return the name that the library with a module has in pyproject.toml."""
    if module.startswith("google.protobuf"):
        return "protobuf"  # several libraries share the folder `google`
    (name,) = {canonicalize_name(name) for name in distributions()[module.partition(".")[0]]}
    return str(name)


def test_libraries_of_the_image_are_those_that_its_packages_import() -> None:
    found = libraries(*IMAGE)
    assert {name: file for name, file in found.items() if name not in RUNTIME} == {}, "not in `dependencies`"
    assert RUNTIME - found.keys() == set(), "imported by nothing in the image"


def test_libraries_of_the_playground_are_those_that_it_imports() -> None:
    found, own = libraries("playground"), EXTRAS["playground"] | EXTRAS["plot"]
    assert {name: file for name, file in found.items() if name not in RUNTIME | own} == {}, "in no extra"
    assert own - found.keys() == set(), "imported by nothing in the playground"
    assert own & RUNTIME == set()


def rows() -> Iterator[tuple[str, str]]:
    """Yield each library of the tables in CONTRIBUTING.md with its extra, which is "" for the image."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("### Libraries\n")[2].partition("\n### ")[0]
    for name, extra in re.findall(r"^\| `([\w-]+)` \|(?: `(\w+)` \|)?", section, re.MULTILINE):
        yield canonicalize_name(name), extra


def test_table_of_contributing_has_each_library_once() -> None:
    expected = [(name, "") for name in RUNTIME] + [(name, extra) for extra, own in EXTRAS.items() for name in own]
    assert sorted(rows()) == sorted(expected)


@pytest.mark.parametrize("cell", [3, 4])
def test_each_library_has_its_last_release_and_what_to_do_without_it(cell: int) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Libraries\n")[2].partition("\n### ")[0]
    for line in re.findall(r"^\| `.*\|$", text, re.MULTILINE):
        cells = [part.strip() for part in line.strip("|").split("|")]
        assert len(cells) == 5, line
        assert cells[cell], line
        if cell == 3:
            assert re.match(r"\d[\w.]*, 20\d\d-\d\d-\d\d", cells[cell]), line
