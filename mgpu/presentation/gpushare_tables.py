"""Formats the tables of `kubectl inspect gpushare` exactly as gpushare's own plugin does.

`mgpu.cli.inspect_gpushare` prints the tables. Scripts parse this output, so it must not change (docs/gpushare.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

_PADDING = 2


@dataclass(frozen=True, slots=True)
class PodRow:
    """The GPU memory that a pod holds on a node, in units of `gpu-mem`.

    Attributes:
        cards: the memory that the pod holds of each card, by the index of the card.
        pending: the memory that the pod holds of unknown cards.
    """

    namespace: str
    name: str
    cards: Mapping[int, int]
    pending: int = 0


@dataclass(frozen=True, slots=True)
class CardRow:
    """The memory of a card and how much of it pods hold, in units of `gpu-mem`."""

    index: int
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node with its address, its cards and the pods on it. Its sums are in units of `gpu-mem`."""

    name: str
    address: str
    cards: tuple[CardRow, ...]
    pods: tuple[PodRow, ...]

    @property
    def total(self) -> int:
        return sum(card.total for card in self.cards)

    @property
    def pending(self) -> int:
        return sum(pod.pending for pod in self.pods)

    @property
    def used(self) -> int:
        return self.pending + sum(card.used for card in self.cards)


def summary(nodes: Sequence[NodeRow], unit: str) -> str:
    """Return the table with one line for each node, and the total of the cluster.

    Args:
        unit: the unit of `gpu-mem`, which the head of the table names.
    """
    indexes = sorted({card.index for node in nodes for card in node.cards})
    pending = any(node.pending for node in nodes)
    head = ["NAME", "IPADDRESS", *(f"GPU{i}(Allocated/Total)" for i in indexes)]
    rows = ["\t".join([*head, *(["PENDING(Allocated)"] if pending else []), f"GPU Memory({unit})"])]
    for node in nodes:
        cards = {card.index: f"{card.used}/{card.total}" for card in node.cards}
        cells = [node.name, node.address, *(cards.get(i, "0/0") for i in indexes)]
        rows.append("\t".join([*cells, *([str(node.pending)] if pending else []), f"{node.used}/{node.total}"]))
    table = align_columns(rows)
    line = "-" * max(map(len, table.splitlines()))
    used, total = _cluster(nodes)
    return f"{table}{line}\nAllocated/Total GPU Memory In Cluster:\n{used}/{total} ({_percent(used, total)})  \n"


def details(nodes: Sequence[NodeRow]) -> str:
    """Return the tables of the option `-d`: what each node's pods hold of each card, and the total of the cluster."""
    pods = [_pod(node, pod) for node in nodes for pod in node.pods]
    line = "-" * (10 + max((len(row) + 1 for row in pods), default=len(_head(nodes[0])) if nodes else 0))
    rows: list[str] = []
    for node in nodes:
        rows += ["", f"NAME:\t{node.name}", f"IPADDRESS:\t{node.address}", "", _head(node)]
        rows += (_pod(node, pod) for pod in node.pods)
        allocated = f"Allocated :\t{node.used} ({_percent(node.used, node.total)})\t"
        rows += [allocated, f"Total :\t{node.total} \t", line]
    used, total = _cluster(nodes)
    rows += ["", "", f"Allocated/Total GPU Memory In Cluster:\t{used}/{total} ({_percent(used, total)})\t"]
    return align_columns(rows)


def _head(node: NodeRow) -> str:
    cards = (f"GPU{card.index}(Allocated)\t" for card in node.cards)
    return f"NAME\tNAMESPACE\t{''.join(cards)}" + ("Pending(Allocated)\t" if node.pending else "")


def _pod(node: NodeRow, pod: PodRow) -> str:
    cards = (f"{pod.cards.get(card.index, 0)}\t" for card in node.cards)
    return f"{pod.name}\t{pod.namespace}\t{''.join(cards)}" + (f"{pod.pending}\t" if node.pending else "")


def _cluster(nodes: Iterable[NodeRow]) -> tuple[int, int]:
    pairs = [(node.used, node.total) for node in nodes]
    return sum(used for used, _ in pairs), sum(total for _, total in pairs)


def _percent(used: int, total: int) -> str:
    return f"{used * 100 // total if total else 0}%"


def align_columns(rows: Sequence[str]) -> str:
    """Align cells that end in a tab into columns, as Go's text/tabwriter does, which gpushare uses.

    A column extends over adjacent lines that have a cell in it. A line without such a cell ends the column, and the
    lines after it are aligned separately. Text after the last tab of a line is not part of a column.
    """
    lines = [row.split("\t") for row in rows]
    widths: list[list[int]] = [[0] * (len(line) - 1) for line in lines]
    for column in range(max(map(len, widths), default=0)):
        for has, block in groupby(range(len(lines)), key=lambda i: column < len(widths[i])):
            if has:
                own = list(block)
                width = max(len(lines[i][column]) for i in own) + _PADDING
                for i in own:
                    widths[i][column] = width
    return "".join(
        "".join(cell.ljust(width) for cell, width in zip(line, of, strict=False)) + line[-1] + "\n"
        for line, of in zip(lines, widths, strict=True)
    )
