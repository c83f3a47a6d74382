"""Computes the environment and the mounts that limit a container as the client of an MPS daemon.

The functions are pure. Mainly `isolation.mps.clients` and `mgpu simulate` call them. A program can change its own
environment variables, so the limits hold only for cooperative programs (docs/mps.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from deviceplugin.delivery.cdi import Edits, Mount
from deviceplugin.isolation.limits import CardLimit, Unenforceable
from deviceplugin.isolation.mps.partitions import VARIABLE as PARTITION
from mgpu.model.cards import Card
from mgpu.model.ledger import Share
from mgpu.model.slice_names import RESOURCE_PREFIX, gigabytes, is_mps, place_of, slice_of_resource

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_NOBODY = "/run/mgpu-no-mps"
"""A pipe directory that does not exist. A client that finds no daemon uses the card without MPS, and the card's limits
have no meaning for it."""
_SHM = "/dev/shm"
"""The folder in a container through which client and server share memory, in addition to the pipes."""
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Client:
    """A container as the client of one card's daemon.

    Attributes:
        card: The UUID of the card.
        memory: The memory limit in the form that MPS reads, such as `4G`; None if there is no limit.
        percent: The limit in percent of the card's threads; None if there is no limit.
        part: The part of the card that a static SM partition of this client has. Where partitions are used every client
            must have one, so a client without a limit of its threads has a part as large as that of the memory.
        partition: The static SM partition, which replaces the percentage; "" if there is none.
    """

    card: str
    memory: str | None = None
    percent: int | None = None
    part: Fraction = Fraction(1)
    partition: str = ""


def pipe_dir(folder: Path, card: str) -> Path:
    """Return the pipe directory of a card's daemon. `folder` is the setting `deviceplugin.mpsDir`."""
    return folder / card / "pipe"


def shm_dir(folder: Path) -> Path:
    """Return the folder that the daemons of all cards and their clients have as /dev/shm."""
    return folder / "shm"


def slice_client_of(shares: Iterable[Share], gpus: Sequence[Card]) -> Client | None:
    """Return the container with these shares as a client by its MPS slice, or None if it has none.

    Args:
        gpus: All GPUs of the node, including partitioned ones.

    Raises Unenforceable if the container would be a client more than once.
    """
    clients: list[Client] = []
    for share in shares:
        if is_mps(share.type) and isinstance(share.card, int):
            name, parent = slice_of_resource(RESOURCE_PREFIX + share.type) or "", place_of(share.card)[0]
            clients += (slice_client(name, card) for card in gpus if card.index == parent)
    if len(clients) > 1:
        cards = len({client.card for client in clients})
        shares_text = f"shares of {cards} cards" if cards > 1 else f"{len(clients)} shares of a card"
        raise Unenforceable(f"it has {shares_text}, but a process has one MPS daemon and one set of limits")
    return clients[0] if clients else None


def slice_client(name: str, card: Card) -> Client:
    """Return a client with an MPS slice.

    Its limits are the memory of the slice, and the corresponding fraction of the card's threads.

    Args:
        name: The name of the slice, such as `4gb`.
    """
    size = gigabytes(name)
    whole = max(1, card.memory // _GIB)
    return Client(card.uuid, f"{size}G", _percent(100 * size, whole), _part(size, whole))


def share_client(limit: CardLimit) -> Client:
    """Return a client with this share of a card. An amount that the share does not state has no limit."""
    card = limit.card
    memory = f"{max(1, limit.memory // _MIB)}M" if limit.memory else None
    if limit.compute:
        return Client(card.uuid, memory, _percent(100 * limit.compute, card.core), _part(limit.compute, card.core))
    return Client(card.uuid, memory, None, _part(limit.memory or card.memory, card.memory))


def _percent(hundredfold: int, whole: int) -> int:
    return min(100, max(1, hundredfold // whole))


def _part(amount: int, whole: int) -> Fraction:
    return min(Fraction(1), Fraction(amount, max(1, whole)))


def client_edits(client: Client, folder: Path) -> Edits:
    """Return the environment and mounts of the client's container.

    The container sees only the card of the client, so the card has the number 0 for CUDA.
    """
    pipe = str(pipe_dir(folder, client.card))
    env = {PIPE: pipe}
    if client.memory is not None:
        env[_MEMORY] = f"0={client.memory}"
    if client.partition:
        env[PARTITION] = f"{client.card}/{client.partition}"
    elif client.percent is not None:
        env[_THREADS] = str(client.percent)
    return Edits(env, (Mount(pipe, pipe), Mount(str(shm_dir(folder)), _SHM)))


def unlimited(variables: Iterable[str]) -> dict[str, str]:
    """Return values with which these variables limit nothing, and no daemon is found."""
    values = {PIPE: _NOBODY, _MEMORY: "", _THREADS: "100", PARTITION: ""}
    return {name: values[name] for name in variables if name in values}


def find_partition(env: Mapping[str, str]) -> str:
    """Return the static SM partition of a container with this environment, without the card; "" if it has none."""
    return env.get(PARTITION, "").partition("/")[2]


def find_daemon(env: Mapping[str, str], folder: Path) -> str | None:
    """Return the UUID of the card whose daemon serves a container with this environment; None if there is none."""
    pipe = Path(env.get(PIPE, ""))
    return pipe.parent.name if pipe == pipe_dir(folder, pipe.parent.name) else None
