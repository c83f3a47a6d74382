"""Makes tables for programs and for `-o wide`, in the form of kubectl's: columns of plain text, three blanks apart.

A cell without a value is `-`, so that a program which splits a line at blanks finds each column. Cells have no blanks,
except those of the last column.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from mgpu.presentation.plain_text import one_line

NONE = "-"
_GAP = "   "
_MEBI = 1 << 20


def table_lines(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a line with the names of the columns, and a line for each row."""
    cells = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for row in chain((names,), cells):
        yield _GAP.join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip()


def _cells(row: Sequence[str]) -> list[str]:
    texts = [one_line(cell) or NONE for cell in row]
    return [*(text.replace(" ", "_") for text in texts[:-1]), texts[-1]]


def core_cell(milli: int | None) -> str:
    """Return thousandths of a card in percent, such as `62.5%`; `-` for None."""
    if milli is None:
        return NONE
    return f"{milli // 10}%" if milli % 10 == 0 else f"{milli / 10}%"


def memory_cell(amount: int | None) -> str:
    """Return bytes in MiB, such as `4096Mi`; `-` for None."""
    return NONE if amount is None else f"{amount // _MEBI}Mi"
