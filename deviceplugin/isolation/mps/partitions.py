"""Reads and computes static SM partitions, which give a client of MPS its own part of the card's SMs.

A daemon that was started with `-S` divides a card into chunks of SMs. `sm_partition add` reserves chunks, and only the
clients whose variable CUDA_MPS_SM_PARTITION names the partition run there. Without `-S` a client has at most a
percentage of the threads, and shares the SMs with others. The functions are pure.

Sources: NVIDIA's Multi-Process Service, release 615, "Common Tasks" (static SM partitioning) and "Legacy MPS v2
Interface". The answers of the program differ from those of the documentation: see `read_added` and `read_listed`, whose
sources are the code of NVIDIA's Isaac ROS GPU Partitioning (2026), and sglang-omni, pull request 2133 (September 2026),
with the answers of an H100.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

VARIABLE = "CUDA_MPS_SM_PARTITION"
_ID = r"[A-Za-z0-9+/=_-]{1,128}"
"""The name of a partition is base64, and may contain slashes."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """The static SM partitions of one card.

    Attributes:
        chunks: The number of chunks into which the card is divided. The SMs that remain belong to no chunk.
        free: The number of chunks that belong to no partition.
        ids: The partitions, without the UUID of the card.
    """

    chunks: int
    free: int
    ids: frozenset[str]


def list_command() -> str:
    return "lspart"


def add_command(card: str, chunks: int) -> str:
    return f"sm_partition add {card} {chunks}"


def remove_command(card: str, id_: str) -> str:
    return f"sm_partition rm {card} {id_}"


def read_added(text: str, card: str) -> str | None:
    """Return the partition in the answer to `add_command`, or None if the answer is an error.

    The answer is `<card>/<partition>` in the documentation, and `Partition <card>/<partition> created` in practice.
    """
    found = re.search(rf"{re.escape(card)}/({_ID})(?=[\s.,]|$)", text)
    return found[1] if found else None


def read_listed(text: str, card: str) -> Partitions | None:
    """Return the partitions in the answer to `lspart`, or None if it does not list the card.

    The table names the card by the start of its UUID. The first row of a card has its free and used chunks, and its
    free and used SMs. The row of a partition has its name, chunks and SMs, and whether it has clients. Cells without a
    value are `-` in the documentation, and blank in practice, so that a row has between 4 and 7 columns.
    """
    rows = [[one for one in line.split() if one != "-"] for line in text.splitlines()]
    rows = [row for row in rows if row and len(row[0]) > len("GPU-") and card.startswith(row[0])]
    whole = next((row for row in rows if len(row) == 5 and all(one.isdecimal() for one in row[1:])), None)
    if whole is None:
        return None
    named = (row for row in rows if row is not whole and _is_partition(row))
    free = int(whole[1])
    return Partitions(free + int(whole[2]), free, frozenset(row[1] for row in named))


def _is_partition(row: Sequence[str]) -> bool:
    return len(row) in (4, 5) and row[2].isdecimal() and re.fullmatch(_ID, row[1]) is not None


def chunks_of(part: Fraction, chunks: int) -> int:
    """Return the number of chunks for a part of the card, rounded down, but at least 1.

    Args:
        chunks: The number of chunks of the whole card.
    """
    return max(1, int(part * chunks))
