"""Whether a commit can be released."""

from datetime import date

import pytest

from release.check import ROOT, VERSIONS, changelog_problems, git_problems, version_of, version_problems

FILES = {path: (ROOT / path).read_text() for path in VERSIONS}
VERSION = version_of((ROOT / "pyproject.toml").read_text())
TODAY = date(2026, 11, 24)
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-11-20\n\n### Added\n\n- shares\n"


def test_this_checkout_names_one_version() -> None:
    assert list(version_problems(VERSION, FILES)) == []


@pytest.mark.parametrize("path", VERSIONS)
def test_a_file_with_another_version_is_reported(path: str) -> None:
    found = list(version_problems(VERSION, {**FILES, path: FILES[path].replace(VERSION, "9.9.9")}))
    assert found
    assert set(found) == {f"{path}: names version 9.9.9, not {VERSION}"}


def test_a_file_without_a_version_is_reported() -> None:
    assert list(version_problems(VERSION, {**FILES, "krew/mgpu.yaml": ""})) == ["krew/mgpu.yaml: names no version"]


@pytest.mark.parametrize("version", ["1.0", "1.0.0.dev1", "1.0.0-rc.1", "01.0.0", "v1.0.0", ""])
def test_only_semantic_versions_are_released(version: str) -> None:
    files = {path: text.replace(VERSION, version) for path, text in FILES.items()}
    assert f"pyproject.toml: version {version!r} is not MAJOR.MINOR.PATCH" in list(version_problems(version, files))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CHANGELOG, ""),
        (CHANGELOG.replace("1.2.0", "1.1.0"), "CHANGELOG.md: has no section [1.2.0]"),
        (CHANGELOG.replace(" - 2026-11-20", ""), "is not `## [1.2.0] - YYYY-MM-DD`"),
        (CHANGELOG.replace("2026-11-20", "2026-11-25"), "2026-11-25, which is in the future"),
        (CHANGELOG.replace("## [Unreleased]\n\n", ""), "the first section is not [Unreleased]"),
        (CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- more\n"), "[Unreleased] is not empty"),
    ],
)
def test_the_changelog_describes_the_version(text: str, problem: str) -> None:
    found = list(changelog_problems("1.2.0", text, TODAY))
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_a_release_is_a_clean_commit_whose_version_is_new() -> None:
    assert list(git_problems("1.2.0", "", "a" * 40, "")) == []
    assert list(git_problems("1.2.0", "", "a" * 40, "a" * 40)) == []
    assert list(git_problems("1.2.0", " M README.md", "a" * 40, "")) == [
        "the checkout has changes that are not committed"
    ]
    assert "already on another commit, bbbbbbbbbbbb" in "".join(git_problems("1.2.0", "", "a" * 40, "b" * 40))
