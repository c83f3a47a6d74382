"""Parses the files of `mgpu simulate` into documents. Every error names the document in which it was found.

`simulate_command` calls `read`, and `world` and `claim_files` check the documents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from mgpu.model.errors import BadObject, Problem

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """One Kubernetes object.

    Attributes:
        where: The place of the object, for messages: `FILE: document N`, where N starts at 1. For an object of a
            `List`, its position in the list follows.
        raw: The object as parsed JSON.
    """

    where: str
    raw: Raw

    @property
    def kind(self) -> str:
        return str(self.raw["kind"])

    @property
    def name(self) -> str:
        return str(self.raw["metadata"].get("name") or "")

    def error_at(self, path: str, message: str) -> BadObject:
        """Return an error about the field at `path` of this document."""
        return BadObject([Problem(f"{self.where}: {path}", message)])

    def error_from(self, error: BadObject) -> BadObject:
        """Return an error with the first problem of `error`, preceded by the place of this document."""
        first = error.problems[0]
        return self.error_at(first.field, first.message)


class _Loader(yaml.CSafeLoader):
    """A YAML loader that reads dates as text, as the API server does."""


_Loader.yaml_implicit_resolvers = {
    first: [row for row in rows if row[0] != "tag:yaml.org,2002:timestamp"]
    for first, rows in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def read(files: Iterable[str], stdin: TextIO) -> Iterator[Document]:
    """Yield the objects of all files in order, including each object of a `List`.

    Raises BadObject if a file cannot be read, or contains something other than Kubernetes objects.

    Args:
        files: The names of the files; "-" stands for standard input.
    """
    for name in files:
        shown = "<stdin>" if name == "-" else name
        try:
            text = stdin.read() if name == "-" else Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadObject([Problem(shown, f"cannot be read: {getattr(error, 'strerror', None) or error}")]) from error
        yield from _documents(shown, text)


def _documents(name: str, text: str) -> Iterator[Document]:
    loader, number = _Loader(text), 0
    while True:
        number += 1
        try:
            if not loader.check_data():  # type: ignore[no-untyped-call]
                return
            found = loader.get_data()
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            text = " ".join(str(error).split())
            raise BadObject([Problem(f"{name}: document {number}", f"is not YAML or JSON: {text}")]) from error
        if found is not None:
            yield from _objects(f"{name}: document {number}", found)


def _objects(where: str, found: object) -> Iterator[Document]:
    """Yield the object, or each object of a `List`. Raises BadObject if one has no kind or no metadata."""
    for key, kind in (("kind", str), ("metadata", dict)):
        if not isinstance(found, dict):
            raise BadObject([Problem(where, f"must be a Kubernetes object, not {type(found).__name__}")])
        if key == "metadata" and _is_list(found):
            continue
        if not isinstance(found.get(key), kind):
            raise BadObject([Problem(f"{where}: {key}", "is missing or of a wrong type")])
    assert isinstance(found, dict)
    if not _is_list(found):
        yield Document(where, found)
        return
    items = found.get("items") or []
    if not isinstance(items, list):
        raise BadObject([Problem(f"{where}: items", "must be a list")])
    for i, item in enumerate(items):
        listed = {"kind": found["kind"].removesuffix("List"), **item} if isinstance(item, dict) else item
        yield from _objects(f"{where}: items[{i}]", listed)


def _is_list(found: Raw) -> bool:
    return str(found.get("kind")).endswith("List") and "items" in found
