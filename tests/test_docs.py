"""What README, CONTRIBUTING and docs/ say of this repository is there: links, commands, options, paths, settings."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest
from pydantic import BaseModel

from mgpu.cli.main import main
from mgpu.dialects.record_verification import Reason
from mgpu.settings import Settings
from playground.simulate.simulate_command import CommandWithOthers

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = (
    "docs",
    "examples",
    "manifests",
    "mgpu",
    "playground",
    "proto",
    "scheduler",
    "webhook",
    "deviceplugin",
    "tests",
)
PLUGINS = {"mgpu": "mgpu.cli.kubectl", "inspect gpushare": "mgpu.cli.inspect_gpushare"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
OTHERS = re.compile(
    r"/(work|root|home)/|\b(docker\.io|quay\.io|ghcr\.io|nvcr\.io|gcr\.io|registry\.\w+\.\w+|pypi\.org)\b"
)

REFERENCE = re.compile(r'([\w./-]*\.md),\s+"([^"\n]+)"')

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: lower case, no punctuation, spaces become hyphens."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours: lines of code blocks (with `\\` at the end: joined), and code in the text."""
    blocks = "\n".join(block.strip("`") for block in FENCE.findall(page.read_text())).replace("\\\n", " ")
    for line in [*blocks.splitlines(), *SPAN.findall(prose(page))]:
        for part in line.strip().removeprefix("$ ").split(" | "):
            words = part.split("  ")[0].split(" #")[0]
            if re.match(r"(\.venv/bin/)?(mgpu|kubectl[ -]mgpu|kubectl[ -]inspect[ -]gpushare)( |$)", words):
                yield shlex.split(words.replace("…", "").replace("[", " ").replace("]", " "))


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The click command that the words begin with, and what is left of them."""
    text = " ".join(words).removeprefix(".venv/bin/").replace("kubectl-", "kubectl ").replace("-gpushare", " gpushare")
    plugin = next((name for name in PLUGINS if text.startswith(f"kubectl {name}")), "")
    if not plugin:
        return main, text.split()[1:]
    found = vars(import_module(PLUGINS[plugin])).values()
    return next(one for one in found if isinstance(one, click.Command)), text.split()[1 + len(plugin.split()) :]


def problem(words: list[str]) -> str:
    """Return the reason why this is not a command line of mgpu, or "" if it is one."""
    command, rest = command_of(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        context = click.Context(command)
        if not (found := command.get_command(context, rest[0])):
            if command.get_params(context) and not isinstance(command, type(main)) and command.invoke_without_command:
                break
            return f"no command {rest[0]!r}"
        command, rest = found, rest[1:]
    if isinstance(command, CommandWithOthers) and rest and (other := command.other(rest[0])):
        command, rest = other, rest[1:]
    known = {name for p in command.get_params(click.Context(command)) for name in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "-h", "--version"}
    strange = [word for word in rest if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"no option {strange[0]}" if strange else ""


def leaves(block: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, field in block.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from leaves(type(default), f"{prefix}{field.alias or name}.")
        elif not field.exclude:
            yield prefix + (field.alias or name), default, field.annotation


def literals(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := literals(part))), ())


def shown(value: object) -> str:
    if value is None or value == "" or (isinstance(value, tuple | Mapping) and not value):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: headings are {sorted(anchors(target))}"


@pages
def test_commands_and_options_exist(page: Path) -> None:
    assert not {" ".join(words): why for words in command_lines(page) if (why := problem(words))}


@pages
def test_paths_exist(page: Path) -> None:
    spans = [span for span in SPAN.findall(prose(page)) if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]+", span)]
    assert not [span for span in spans if not any(ROOT.glob(span.rstrip("/")))]


CODE = re.compile(r"([\w/]+\.py):([A-Za-z_][\w.]*)")


@cache
def definitions(file: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) that a module defines."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pages
def test_functions_exist(page: Path) -> None:
    """Code in the form `path:function`."""
    named = [match.groups() for span in SPAN.findall(prose(page)) if (match := CODE.fullmatch(span))]
    missing = [path for path, _ in named if not (ROOT / path).is_file()]
    assert not missing
    assert not [(path, name) for path, name in named if name not in definitions(ROOT / path)]


def test_the_lifecycle_of_a_pod_names_functions_of_every_process() -> None:
    text = (ROOT / "docs/design/pod-lifecycle.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        assert CODE.search(section), f"section {title!r} names no function"
    assert {path.split("/")[0] for path, _ in CODE.findall(text)} == {"mgpu", "webhook", "scheduler", "deviceplugin"}


@pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets


@pages
def test_no_machine_of_ours_and_no_registry_is_named(page: Path) -> None:
    assert not OTHERS.search(page.read_text())


@pytest.mark.parametrize("folder", ["docs", "docs/design"])
def test_every_page_is_in_the_index(folder: str) -> None:
    index = ROOT / folder / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(prose(index))}
    assert {page.name for page in PAGES if page.parent == index.parent and page != index} <= linked


def test_every_page_is_in_the_contents_of_the_site() -> None:
    named = (ROOT / "docs/site/contents.md").read_text().split()
    paths = {str(page.relative_to(ROOT).with_suffix("")) for page in PAGES}
    assert sorted(paths - {"README", "docs/site/contents"} - set(named)) == []


@cache
def headings(page: Path) -> set[str]:
    return set(re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)) if page.exists() else set()


def test_sections_that_code_names_exist() -> None:
    """`docs/design/mgpu.md, "Filter"`: a page by its path from the root, and one of its headings."""
    named = [
        (file.relative_to(ROOT), page, heading)
        for folder in (*FOLDERS, "bench")
        for kind in ("*.py", "*.yaml", "*.sh")
        for file in (ROOT / folder).rglob(kind)
        if ".md" in (text := file.read_text())
        for page, heading in REFERENCE.findall(re.sub(r"\s*\n[ #]*", " ", text))
    ]
    assert len(named) > 50
    assert not [one for one in named if one[2] not in headings(ROOT / one[1])]


def test_sections_that_design_pages_name_exist() -> None:
    folder = ROOT / "docs/design"
    named = [
        (page, *found)
        for page in folder.glob("*.md")
        for found in re.findall(r'(\w+\.md) \("([^"\n]+)"\)', page.read_text())
    ]
    assert not [one for one in named if one[2] not in headings(folder / one[1])]


def test_the_table_of_settings_is_that_of_the_code() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.+?) \| (.*?) \| .+ \|$", (ROOT / "docs/settings.md").read_text(), re.MULTILINE
    )
    others = [(key, default, [one for one in literals(kind) if one != default]) for key, default, kind in leaves()]
    known = [(key, shown(default), ", ".join(f"`{one}`" for one in more)) for key, default, more in others]
    assert sorted(rows) == sorted(known)


@pytest.mark.parametrize(
    "line", ["mgpu wat", "mgpu inspect --wat", "mgpu simulate openb --margin", "kubectl inspect gpushare -x"]
)
def test_what_does_not_exist_is_found(line: str) -> None:
    assert problem(line.split())


def test_operations_tells_of_every_event() -> None:
    """Of the scheduler and the agent; those of MtgpuPods have a test of their own."""
    told = re.compile(
        r'(?:tell|warn|warn_node|warn_pod)\((?:[^()]|\([^()]*\))*?"([A-Z]\w+)"|(?:reason: str|REASON) = "(\w+)"'
        r'|\w ?= ?"(Mgpu[A-Z]\w+)"'
    )
    sources = [path.read_text() for part in ("scheduler", "deviceplugin") for path in (ROOT / part).rglob("*.py")]
    reasons = {name for text in sources for names in told.findall(text) for name in names if name}
    reasons |= set(Reason)
    (table,) = re.findall(r"^\| Event \|.*?\n\n", (ROOT / "docs/operations.md").read_text(), re.MULTILINE | re.DOTALL)
    assert {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in SPAN.findall(row)} == reasons


def test_install_names_every_overlay_and_component() -> None:
    page = (ROOT / "docs/install.md").read_text()
    folders = [one for kind in ("overlays", "components") for one in (ROOT / "manifests" / kind).iterdir()]
    assert not [one.name for one in folders if one.is_dir() and f"{one.name}`" not in page]
