"""An explanation as it is read in a terminal. Pure."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mgpu.model.cards import CardState
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.plain_text import one_line
from scheduler.decisions.explanation import CardRow, Explanation, NodeRow

_MOST_HOLDERS, _MOST_NAMES, _MOST_REASONS = 2, 4, 12
_DIM, _GOOD, _BAD = "grey50", "green", "yellow"


def shown(found: Explanation) -> Group:
    parts: list[RenderableType] = [Text.assemble((found.of, "bold"), f": {one_line(found.stands)}"), *_ask(found)]
    parts += (Text(one_line(f"✗ {problem}"), style="bold red") for problem in found.problems)
    parts += [Text(), *(Text(one_line(sentence), style="bold") for sentence in found.verdict)]
    listed = {row.name for row in found.nodes} & found.cards.keys()
    if found.nodes and not found.problems:
        parts += [Text(), *_nodes(found, listed)]
    for name, rows in found.cards.items():
        if rows and name not in listed:
            parts += [Text(), Text(f"{name}:"), _cards(rows)]
    if found.said:
        parts += [Text(), *_said(found)]
    return Group(*parts)


def _ask(found: Explanation) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=_DIM, no_wrap=True)
    grid.add_column(overflow="fold")
    for i, (container, text) in enumerate(found.request):
        grid.add_row("" if i else f"asks as {found.dialect}", f"{container}: {text}")
    if found.constraints:
        grid.add_row("wishes", ", ".join(f"{key} {value}" for key, value in found.constraints.items()))
    if found.chosen:
        grid.add_row("cards chosen", found.chosen)
    if grid.row_count:
        yield Padding(grid, (0, 0, 0, 2))


def _nodes(found: Explanation, listed: set[str]) -> Iterator[RenderableType]:
    """Those with their cards one by one; the others together, by the reason."""
    for row in found.nodes:
        if row.name in listed:
            yield Text.assemble((row.name, "bold"), ": ", _answer(row))
            yield Padding(_cards(found.cards[row.name]), (0, 0, 0, 2))
    rest = [row for row in found.nodes if row.name not in listed]
    fits = [row for row in rest if not row.reason]
    if fits:
        best = ", ".join(f"{row.name} ({row.points})" for row in fits[:_MOST_NAMES])
        yield Text(f"{_count(len(fits))} fit, best first (points of 10): {best}{_more(fits)}", style=_GOOD)
    reasons: dict[str, list[NodeRow]] = {}
    for row in rest:
        if row.reason:
            # Some name the node, and thousands have no cards.
            reasons.setdefault(one_line(row.reason.replace(f"node {row.name} ", "the node ")), []).append(row)
    ordered = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    for reason, rows in ordered[:_MOST_REASONS]:
        names = ", ".join(row.name for row in rows[:_MOST_NAMES])
        yield Text.assemble((f"{_count(len(rows))}", "bold"), f": {reason}", (f"  {names}{_more(rows)}", _DIM))
    if len(ordered) > _MOST_REASONS:
        left = sum(len(rows) for _, rows in ordered[_MOST_REASONS:])
        yield Text(f"… and {_count(left)} for {len(ordered) - _MOST_REASONS} other reasons", style=_DIM)
    if len(rest) > 1 and not listed:
        yield Text("--node NAME shows the cards of one.", style=_DIM)


def _answer(row: NodeRow) -> Text:
    if not row.reason:
        return Text(f"fits ({row.points} of 10 points)", style=_GOOD)
    hope = (
        " (fits once its cards are cut anew)" if row.recut else " (evicting pods cannot help)" if row.hopeless else ""
    )
    return Text(f"{one_line(row.reason)}{hope}", style=_BAD)


def _cards(rows: Sequence[CardRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    for name in ("card", "free core", "free memory", "", "held by"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("card", "free core", "free memory") else "left"
        )
    for row in rows:
        state = row.state
        mark = Text("✔ its own", style=_GOOD) if row.own else Text(row.reason, style=_BAD)
        if not (row.reason or row.own):
            mark = Text(_odd(state), style=_BAD)
        amounts = (format_core(state.core_left), format_bytes(state.memory_left))
        table.add_row(str(state.card.index), *amounts, mark, Text(_holders(row), style=_DIM))
    return table


def _odd(state: CardState) -> str:
    if not state.card.healthy:
        return "unhealthy"
    return f"of GPUID {state.gpuid}" if state.gpuid else ""


def _holders(row: CardRow) -> str:
    more = f" and {len(row.holders) - _MOST_HOLDERS} more" if len(row.holders) > _MOST_HOLDERS else ""
    return ", ".join(row.holders[:_MOST_HOLDERS]) + more


def _said(found: Explanation) -> Iterator[RenderableType]:
    yield Text("What is written on it:", style=_DIM)
    for row in found.said:
        reason = f" ({row.reason})" if row.reason else ""
        text = f"{row.type} {row.status}{reason}{f': {row.message}' if row.message else ''}"
        yield Padding(Text(text), (0, 0, 0, 2))


def _count(number: int) -> str:
    return f"{number:,} node{'' if number == 1 else 's'}"


def _more(rows: Sequence[NodeRow]) -> str:
    return f" and {len(rows) - _MOST_NAMES:,} more" if len(rows) > _MOST_NAMES else ""
