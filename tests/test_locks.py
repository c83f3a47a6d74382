"""requirements/: what is locked satisfies pyproject.toml, and `requirements/check.py` finds where it does not."""

from pathlib import Path

import pytest

from requirements import check

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
LOCKS = {file: (ROOT / f"requirements/{file}.txt").read_text() for file in check.FILES}


def test_locked_versions_satisfy_pyproject() -> None:
    assert check.problems(PYPROJECT, LOCKS) == []
    assert check.main() == 0


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ('"flask>=3.0"', '"flask>=99"', "requirements/runtime.txt: flask=="),
        ('"rich>=13.9"', '"rich>=13.9", "left-pad>=1"', "requirements/runtime.txt: left-pad, which pyproject.toml"),
        ('"aiohttp>=3.11"', '"aiohttp>=99"', "requirements/demo.txt: aiohttp=="),
        ('"ruff>=0.9"', '"ruff<0.1"', "requirements/dev.txt: ruff=="),
    ],
)
def test_requirement_that_the_lock_does_not_satisfy_is_named(before: str, after: str, why: str) -> None:
    assert before in PYPROJECT
    assert any(text.startswith(why) for text in check.problems(PYPROJECT.replace(before, after), LOCKS))


def without(text: str, name: str) -> str:
    """A requirements file without the entry of this name."""
    entries, kept = text.splitlines(keepends=True), []
    inside = False
    for line in entries:
        if not line.startswith((" ", "#")):
            inside = line.startswith(f"{name}==")
        if not inside:
            kept.append(line)
    return "".join(kept)


def test_library_of_a_library_that_is_not_locked_is_named() -> None:
    locks = {**LOCKS, "runtime": without(LOCKS["runtime"], "werkzeug")}
    assert "requirements/runtime.txt: werkzeug, which flask requires, is missing" in check.problems(PYPROJECT, locks)


def test_pin_without_a_hash_or_in_two_versions_is_named() -> None:
    bare = without(LOCKS["runtime"], "click") + "click==0.1\n"
    found = check.problems(PYPROJECT, {**LOCKS, "runtime": bare})
    assert "requirements/runtime.txt: click has no hash" in found
    assert "requirements/demo.txt: the version of click differs from that in another lock file" in found


@pytest.mark.parametrize("line", ["flask>=3", "-e .", "--no-binary x", "mgpu @ file:x"])
def test_line_that_is_no_pinned_version_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a pinned version"):
        list(check.pins(line))


def test_files_name_no_registry() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        assert "://" not in path.read_text()
