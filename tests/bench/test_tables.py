import io

import pytest
from rich.console import Console

from bench.history import Measured, Run
from bench.rows import Row
from bench.tables import amount, run_table

FILTER = Row(what="filter, 5,000 nodes", value=12.0, unit="ms", reference=4.0, remark="p99 30")
ALONE = Row(what="beside hard pods", value=3.0, unit="ms", reference=2.0, reference_name="alone")


def shown(*sections: Measured) -> list[str]:
    run = Run("a1b2c3d4e5f6", True, "2026-11-23", "2 × CPU", "3.11.7", True, sections)
    console = Console(file=io.StringIO(), width=140)
    console.print(run_table(run))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def line(lines: list[str], what: str) -> str:
    (found,) = (one for one in lines if what in one)
    return " ".join(found.split())


def test_the_heading_names_commit_and_machine() -> None:
    assert line(shown(), "a1b2c3d4e5 ") == "a1b2c3d4e5 with changes on 2 × CPU, Python 3.11.7, 2026-11-23, quick"


def test_a_row_shows_the_reference_and_the_ratio() -> None:
    lines = shown(Measured("filter", (FILTER,)), Measured("tenants", (ALONE,)))
    assert line(lines, "5,000 nodes") == "filter, 5,000 nodes 12 ms 4 no-op × 3.00 p99 30"
    assert line(lines, "beside hard pods") == "beside hard pods 3 ms 2 alone × 1.50"
    assert not [one for one in lines if "peer" in one]


def test_the_peer_has_columns_if_it_was_measured() -> None:
    peer = Row(what="filter", value=12.0, unit="ms", peer=2400.0)
    lines = shown(Measured("filter", (peer, FILTER)))
    assert line(lines, "what") == "what mgpu reference ratio peer ratio to peer remark"
    assert line(lines, "2,400") == "filter 12 ms 2,400 × 0.005"


def test_a_skipped_section_says_why() -> None:
    lines = shown(Measured("filter", skipped="KUBEBUILDER_ASSETS is not set"))
    assert line(lines, "skipped") == "skipped: KUBEBUILDER_ASSETS is not set"


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1.5, "1.5"), (12.34, "12.3"), (123.4, "123"), (2400.0, "2,400"), (0, "0")]
)
def test_an_amount_has_three_digits(value: float, text: str) -> None:
    assert amount(value) == text
