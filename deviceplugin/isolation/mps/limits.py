"""What a container gets as a client of its card's MPS daemon: environment and mounts, with its share's limits. Pure.

A program can change the variables of its own environment: the limits bind cooperative programs (docs/mps.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.delivery.cdi import Edits
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Share
from mgpu.model.slice_names import RESOURCE_PREFIX, gigabytes, is_mps, place_of, slice_named

PIPE, ACTIVE, MEMORY = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)
SHM = "/dev/shm"
"""Client and server share memory here, beside the pipes."""
_GIB, _MIB = 1 << 30, 1 << 20


class Unenforceable(Exception):
    """The container cannot be held to its shares; the message says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """A container as the client of one card's daemon.

    Attributes:
        card: the card's UUID.
        memory: the limit as MPS reads it (`4G`); None: no limit.
        percent: the limit of the card's threads; None: no limit.
    """

    card: str
    memory: str | None = None
    percent: int | None = None


def pipe_dir(folder: Path, card: str) -> Path:
    """Return the pipe directory of a card's daemon, below the setting `deviceplugin.mpsDir`."""
    return folder / card / "pipe"


def shm_dir(folder: Path) -> Path:
    """Return the folder that is /dev/shm for the daemons of all cards and for their clients."""
    return folder / "shm"


def client_of(shares: Iterable[Share], gpus: Sequence[Card], *, enforce: bool) -> Client | None:
    """Return what a container with these shares is a client of; None: of no daemon. Raises Unenforceable.

    A container with an MPS slice always is a client, one with a share of a card only with `enforce`, and one with a
    whole card never.

    Args:
        gpus: all of the node's, also those that are cut.
    """
    found: list[Client] = []
    for share in shares:
        if is_mps(share.type) and isinstance(share.card, int):
            name, parent = slice_named(RESOURCE_PREFIX + share.type) or "", place_of(share.card)[0]
            found += (of_slice(name, card) for card in gpus if card.index == parent)
        elif enforce and share.type == GPU and not share.whole:
            found += (of_share(share, card) for card in gpus if share.is_on(card))
    if len(found) > 1:
        cards = len({client.card for client in found})
        what = f"shares of {cards} cards" if cards > 1 else f"{len(found)} shares of a card"
        raise Unenforceable(f"it has {what}, and a process is a client of one MPS daemon, with one set of limits")
    return found[0] if found else None


def of_slice(name: str, card: Card) -> Client:
    """Return the client that has the MPS slice `name` (`4gb`): its GiB, and the same fraction of the card's threads."""
    size = gigabytes(name)
    return Client(card.uuid, f"{size}G", _percent(100 * size, max(1, card.memory // _GIB)))


def of_share(share: Share, card: Card) -> Client:
    """Return the client that has this share of `card`. What the share does not mention has no limit.

    Raises Unenforceable where another system's record gives the amounts of all the pod's containers together.
    """
    amount = share.amount(card)
    if not amount.memory and not amount.core:
        raise Unenforceable("its record does not say how much of the pod's share is its own")
    memory = f"{max(1, amount.memory // _MIB)}M" if amount.memory else None
    return Client(card.uuid, memory, _percent(100 * amount.core, card.core) if amount.core else None)


def _percent(hundredfold: int, whole: int) -> int:
    return min(100, max(1, hundredfold // whole))


def edits(client: Client, folder: Path) -> Edits:
    """Return what the client's container gets. It sees this card alone, so that CUDA numbers it 0."""
    pipe = str(pipe_dir(folder, client.card))
    env = {PIPE: pipe}
    if client.memory is not None:
        env[MEMORY] = f"0={client.memory}"
    if client.percent is not None:
        env[ACTIVE] = str(client.percent)
    return Edits(env, ((pipe, pipe), (str(shm_dir(folder)), SHM)))


def daemon_of(env: Mapping[str, str], folder: Path) -> str | None:
    """Return the card whose daemon a container with this environment is a client of; None: of none of the agent's."""
    pipe = Path(env.get(PIPE, ""))
    return pipe.parent.name if pipe == pipe_dir(folder, pipe.parent.name) else None
