"""What makes a container a client of its card's MPS daemon, within the limits of its share. Pure.

They bind programs that leave them alone: docs/mps.md says what they are good for.
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
"""Where client and server meet, beside the pipes."""
_GIB, _MIB = 1 << 30, 1 << 20


class Unenforceable(Exception):
    """The container cannot be held to its shares; the message says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """A container of one card. card: its UUID. memory: as MPS reads it (`4G`); "": no limit. percent: of the card's
    threads; None: no limit.
    """

    card: str
    memory: str = ""
    percent: int | None = None


def pipe_dir(folder: Path, card: str) -> Path:
    """The pipe directory of the daemon of the card with this UUID; `folder`: the setting `mpsDir`."""
    return folder / card / "pipe"


def shm_dir(folder: Path) -> Path:
    """What is /dev/shm for the daemons of all cards and for their clients."""
    return folder / "shm"


def client_of(shares: Iterable[Share], gpus: Sequence[Card], *, enforce: bool) -> Client | None:
    """What one container is a client of, given its shares and the node's GPUs, divided ones too; None: of nothing.

    An MPS slice always is one; a share of a card only where limits are to be enforced, a whole card never.
    Raises Unenforceable.
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
    """The client that has the MPS slice `name` (`4gb`) of `card`: its GiB, and as much of the card's threads."""
    size = gigabytes(name)
    return Client(card.uuid, f"{size}G", _percent(100 * size, max(1, card.memory // _GIB)))


def of_share(share: Share, card: Card) -> Client:
    """The client that has this share of `card`. Of what it does not ask for it has no limit.

    Raises Unenforceable where another system's record gives a pod's amounts as one, for all its containers.
    """
    amount = share.amount(card)
    if not amount.memory and not amount.core:
        raise Unenforceable("its record does not say how much of the pod's share is its own")
    memory = f"{max(1, amount.memory // _MIB)}M" if amount.memory else ""
    return Client(card.uuid, memory, _percent(100 * amount.core, card.core) if amount.core else None)


def _percent(hundredfold: int, whole: int) -> int:
    return min(100, max(1, hundredfold // whole))


def edits(client: Client, folder: Path) -> Edits:
    """The container has the card alone in sight, so for CUDA its number is 0."""
    pipe = str(pipe_dir(folder, client.card))
    env = {PIPE: pipe}
    if client.memory:
        env[MEMORY] = f"0={client.memory}"
    if client.percent is not None:
        env[ACTIVE] = str(client.percent)
    return Edits(env, ((pipe, pipe), (str(shm_dir(folder)), SHM)))


def daemon_of(env: Mapping[str, str], folder: Path) -> str:
    """The UUID of the card whose daemon a container with this environment is a client of; "": of none of ours."""
    pipe = Path(env.get(PIPE, ""))
    return pipe.parent.name if pipe == pipe_dir(folder, pipe.parent.name) else ""
