"""Files of Kubernetes objects: YAML or JSON, several documents each, `List` too."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from mgpu.model.errors import BadObject, Problem

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """`where` names it in messages: `FILE: document N`, counted from 1."""

    where: str
    raw: Raw

    @property
    def kind(self) -> str:
        return str(self.raw["kind"])

    @property
    def name(self) -> str:
        return str(self.raw["metadata"].get("name") or "")

    def wrong(self, path: str, message: str) -> BadObject:
        return BadObject([Problem(f"{self.where}: {path}", message)])

    def blame(self, error: BadObject) -> BadObject:
        """The first problem of an error, with this document named: one clear line."""
        first = error.problems[0]
        return self.wrong(first.field, first.message)


class _Loader(yaml.CSafeLoader):
    """YAML as the API server reads it: dates are text."""


_Loader.yaml_implicit_resolvers = {
    first: [row for row in rows if row[0] != "tag:yaml.org,2002:timestamp"]
    for first, rows in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def read(files: Iterable[str], stdin: TextIO) -> Iterator[Document]:
    """The objects of all files in order, those of a `List` one by one. Raises BadObject with `FILE: document N`."""
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
    for field, kind in (("kind", str), ("metadata", dict)):
        if not isinstance(found, dict):
            raise BadObject([Problem(where, f"must be a Kubernetes object, not {type(found).__name__}")])
        if field == "metadata" and _is_list(found):
            continue
        if not isinstance(found.get(field), kind):
            raise BadObject([Problem(f"{where}: {field}", "is missing or of a wrong type")])
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
