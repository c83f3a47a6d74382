from importlib import import_module

import pytest

from bench import sections
from bench.rows import Options, Row
from bench.sections import SECTIONS, measure, title


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_has_a_title_and_rows(section: str) -> None:
    assert title(section)
    assert callable(import_module(f"bench.{section}").rows)


def test_two_rows_of_one_name_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Section:
        @staticmethod
        def rows(_: Options) -> list[Row]:
            return [Row(what="filter", value=1, unit="ms"), Row(what="filter", value=2, unit="ms")]

    monkeypatch.setattr(sections, "import_module", lambda _: Section)
    with pytest.raises(ValueError, match="several rows filter"):
        measure("twice", Options())


def test_the_numbers_of_nodes_of_the_command_line_replace_those_of_the_section() -> None:
    assert Options().sizes(100, 1_000) == (100, 1_000)
    assert Options((7,)).sizes(100, 1_000) == (7,)


def test_a_quick_run_repeats_a_fifth_as_often_but_at_least_once() -> None:
    assert [Options(quick=True).repeats(count) for count in (200, 3)] == [40, 1]
    assert Options().repeats(200) == 200
