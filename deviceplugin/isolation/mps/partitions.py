"""Reads and computes static SM partitions, which give a client of MPS its own part of the card's SMs.

A daemon that was started with `-S` divides a card into chunks of SMs. `sm_partition add` reserves chunks, and only the
clients whose variable CUDA_MPS_SM_PARTITION names the partition run there. Without `-S` a client has at most a
percentage of the threads, and shares the SMs with others. The functions are pure.

Source: NVIDIA's Multi-Process Service, release 615, "Common Tasks" (static SM partitioning) and "Legacy MPS v2
Interface". Some versions of the control program answer `sm_partition add` with the name of the partition alone, others
with a sentence that contains it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_MPS_SM_PARTITION"
_ID = r"[A-Za-z0-9+=_-]{1,128}"
_COLUMNS = 7


@dataclass(frozen=True, slots=True)
class Partitions:
    """The static SM partitions of one card.

    Attributes:
        chunks: The number of chunks into which the card is divided.
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
    """Return the partition in the answer to `add_command`, or None if the answer is an error."""
    found = re.search(rf"{re.escape(card)}/({_ID})(?=[\s.,]|$)", text)
    return found[1] if found else None


def read_listed(text: str, card: str) -> Partitions | None:
    """Return the partitions in the answer to `lspart`; None if the daemon has none because it runs without `-S`.

    The table names the card by the start of its UUID, and has the columns GPU, partition, free and used chunks, free
    and used SMs, and clients. The row of the partition `-` is that of the whole card.
    """
    rows = [columns for columns in map(str.split, text.splitlines()) if _is_of(columns, card)]
    whole = next((columns for columns in rows if columns[1] == "-"), None)
    if whole is None or not all(one.isdecimal() for one in whole[2:4]):
        return None
    free, used = int(whole[2]), int(whole[3])
    return Partitions(free + used, free, frozenset(columns[1] for columns in rows if columns[1] != "-"))


def _is_of(columns: Sequence[str], card: str) -> bool:
    return len(columns) == _COLUMNS and len(columns[0]) > len("GPU-") and card.startswith(columns[0])


def chunks_of(compute: int, core: int, chunks: int) -> int:
    """Return the number of chunks for a share of the compute, rounded down, but at least 1.

    Args:
        compute: The share, in the unit of `core`.
        core: The whole card.
        chunks: The number of chunks of the whole card.
    """
    return max(1, compute * chunks // max(1, core))
