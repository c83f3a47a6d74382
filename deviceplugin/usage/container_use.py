"""Brings together what is used of the cards and what containers hold of them. The functions are pure.

A use counts for a container that holds a share of the card. All other processes on the card are foreign: those of pods
that hold nothing there, those that run in no pod, and the server of MPS.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deviceplugin.isolation.backend import Key, Measured
from deviceplugin.pods.gpu_pod import GpuPod, LimitedPod, kubelets_uid
from deviceplugin.usage.cgroup_names import CgroupName
from deviceplugin.usage.nvml_usage import CardReading, ProcessUse
from deviceplugin.usage.process_owners import Owners, Unowned
from mgpu.dialects import mtgpu
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding
from mgpu.model.slice_names import is_slice, place_of
from mgpu.model.usage_problems import UsageProblem

Names = Mapping[str, tuple[str, str]]
"""By the ID of a container, the UID by which the kubelet knows its pod, and its name in the pod."""


@dataclass(frozen=True, slots=True)
class ContainerUse:
    """What one container uses of one card, beside what it holds of it.

    Attributes:
        uid: The UID of the pod.
        pod: The name of the pod.
        memory: The memory that the container uses, in bytes; None if that is not known.
        sm: Its use of the SMs since the last reading, from 0 to 1; None if that is not known.
        limit: The memory of its share in bytes; None if the share states none.
        whole: Whether it holds all of the card, so that it cannot use more than it holds.
        claims: The names of the ResourceClaims by which it sees the card.
        has_own_share: Whether it holds a share of the card besides those claims.
    """

    uid: str
    namespace: str
    pod: str
    container: str
    card: Card
    memory: int | None = None
    sm: float | None = None
    limit: int | None = None
    whole: bool = False
    claims: tuple[str, ...] = ()
    has_own_share: bool = False

    @property
    def key(self) -> Key:
        return self.uid, self.container

    @property
    def order(self) -> tuple[str, str, str, str, int]:
        return self.namespace, self.pod, self.uid, self.container, self.card.index


@dataclass(frozen=True, slots=True)
class CardUsage:
    """What is used of one card.

    Attributes:
        memory: The memory in use, in bytes; None if that is not known.
        sm: The part of the time in which a kernel ran, from 0 to 1; None if that is not known.
        foreign: The number of foreign processes; None if that is not known.
        foreign_memory: The memory that they use, in bytes; None if that is not known.
    """

    card: Card
    memory: int | None = None
    sm: float | None = None
    foreign: int | None = None
    foreign_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What is used of a node's cards.

    Attributes:
        cards: One entry for each card, by index.
        containers: One entry for each container and card, sorted by `ContainerUse.order`.
        problem: Why something is not known that could be; None if nothing is missing.
    """

    cards: tuple[CardUsage, ...] = ()
    containers: tuple[ContainerUse, ...] = ()
    problem: UsageProblem | None = None


@dataclass(frozen=True, slots=True)
class NodeShares:
    """What the containers of a node hold.

    Attributes:
        gpus: All GPUs.
        devices: The GPUs that are not partitioned, and the slices.
        held: The holdings of pods that run.
        pods: The pods that request GPUs.
        limited: The Pods of MtgpuPods.
        by_claims: What containers hold by ResourceClaims: a row without use for each container and card.
    """

    gpus: Sequence[Card]
    devices: Sequence[Card]
    held: Sequence[Holding]
    pods: Sequence[GpuPod]
    limited: Sequence[LimitedPod] = ()
    by_claims: Sequence[ContainerUse] = ()


@dataclass
class Sum:
    """The sum of what is used; None as soon as one part is not known."""

    memory: int | None = 0
    sm: float | None = 0.0

    def add(self, memory: int | None, sm: float | None) -> None:
        self.memory = None if self.memory is None or memory is None else self.memory + memory
        self.sm = None if self.sm is None or sm is None else min(1.0, self.sm + sm)


@dataclass
class _OfCard:
    """The processes of a card: the sum of each container, and the foreign ones."""

    containers: dict[Key, Sum] = field(default_factory=dict)
    foreign: list[ProcessUse] = field(default_factory=list)


def combine(
    shares: NodeShares, readings: Sequence[CardReading], owners: Owners, names: Names, measured: Sequence[Measured]
) -> Usage:
    """Return what is used of the cards.

    What an isolation back end has measured takes precedence over NVML.

    Args:
        readings: What NVML says, one for each GPU.
        owners: The containers of the processes in `readings`.
        names: The names of running containers.
    """
    by_card = {reading.card: reading for reading in readings}
    rows = {(row.key, row.card.uuid): row for row in shares.by_claims}
    for row in _held_rows(shares):
        of_claims = rows.get((row.key, row.card.uuid))
        rows[row.key, row.card.uuid] = _together(row, of_claims) if of_claims is not None else row
    sums: dict[str, _OfCard] = {}
    for card in shares.gpus:
        reading = by_card.get(card.uuid)
        if reading is not None and reading.processes is not None and owners.problem is None:
            of_card = _sort_out(reading.processes, shares, owners, names, card, rows)
            sums[card.uuid] = of_card
    of_backends = {(one.key, one.card): one for one in measured}
    rows = {(row.key, row.card.uuid): row for row in _limited_rows(shares, of_backends)} | rows
    filled = [_filled(row, sums.get(row.card.uuid)) for row in rows.values()]
    final = [_with_measured(row, of_backends.get((row.key, row.card.uuid))) for row in filled]
    return Usage(
        tuple(_card_usage(card, by_card.get(card.uuid), sums.get(card.uuid)) for card in shares.gpus),
        tuple(sorted(final, key=lambda row: row.order)),
        _problem(readings, owners),
    )


def _problem(readings: Sequence[CardReading], owners: Owners) -> UsageProblem | None:
    if owners.problem:
        return owners.problem
    return next((reading.problem for reading in readings if reading.problem), None)


def _held_rows(shares: NodeShares) -> Iterator[ContainerUse]:
    """Yield a row without use for each running container and card of which it holds a share.

    An occupy pod only keeps other pods off its card (docs/mtgpu.md). That it uses nothing says nothing.
    """
    pods = {gpu_pod.pod.uid: gpu_pod for gpu_pod in shares.pods}
    by_index = {card.index: card for card in shares.gpus}
    for held in shares.held:
        gpu_pod = pods.get(held.uid)
        if gpu_pod is None or mtgpu.occupy_target(gpu_pod.pod):
            continue
        running = gpu_pod.started_containers - gpu_pod.completed_init_containers
        found: dict[tuple[str, str], ContainerUse] = {}
        for share in held.shares:
            for device in shares.devices if share.card is not None and share.container in running else ():
                card = by_index.get(place_of(device.index)[0] if is_slice(device.type) else device.index)
                if card is None or not share.is_on(device) or (device.type != GPU and not is_slice(device.type)):
                    continue
                key = share.container, card.uuid
                row = found.get(key) or ContainerUse(held.uid, held.namespace, held.name, share.container, card)
                memory = share.amount(device).memory
                limit = (row.limit or 0) + memory if memory else row.limit
                found[key] = replace(row, limit=limit, whole=share.whole and device.type == GPU)
        yield from found.values()


def _together(own: ContainerUse, of_claims: ContainerUse) -> ContainerUse:
    """Return the row of a container that holds a share of a card and also sees the card by claims."""
    is_limited = own.limit is not None and of_claims.limit is not None
    limit = (own.limit or 0) + (of_claims.limit or 0) if is_limited else None
    whole = own.whole or of_claims.whole
    return replace(own, limit=limit, whole=whole, claims=of_claims.claims, has_own_share=True)


def _limited_rows(shares: NodeShares, places: Iterable[tuple[Key, str]]) -> Iterator[ContainerUse]:
    """Yield a row for each of these containers and cards that belongs to the Pod of an MtgpuPod."""
    cards = {card.uuid: card for card in shares.gpus}
    pods = {(pod.uid, pod.card): pod for pod in shares.limited}
    for (uid, container), uuid in places:
        pod = pods.get((uid, uuid))
        if pod is not None and uuid in cards:
            yield ContainerUse(uid, pod.namespace, pod.name, container, cards[uuid], limit=pod.memory)


def _sort_out(
    processes: Sequence[ProcessUse],
    shares: NodeShares,
    owners: Owners,
    names: Names,
    card: Card,
    rows: dict[tuple[Key, str], ContainerUse],
) -> _OfCard:
    """Return the sums of a card. The Pods of MtgpuPods get their rows here, because only their processes show which
    containers they have.
    """
    uids = {kubelets_uid(gpu_pod.pod.annotations, gpu_pod.pod.uid): gpu_pod.pod.uid for gpu_pod in shares.pods}
    found = _OfCard()
    for process in processes:
        owner = owners.by_pid.get(process.pid, Unowned.GONE)
        if owner is Unowned.GONE:
            continue
        key = _key(owner, uids, names, rows, card) if isinstance(owner, CgroupName) else None
        if key and (key, card.uuid) not in rows:
            rows.update({(row.key, card.uuid): row for row in _limited_rows(shares, [(key, card.uuid)])})
        if key and (key, card.uuid) in rows:
            found.containers.setdefault(key, Sum()).add(process.memory, process.sm)
        else:
            found.foreign.append(process)
    return found


def _key(
    owner: CgroupName,
    uids: Mapping[str, str],
    names: Names,
    rows: Iterable[tuple[Key, str]],
    card: Card,
) -> Key | None:
    """Return the container of a process; None if it is not known.

    If the runtime has not named the container, the process belongs to the only container of its pod on the card.
    """
    uid = uids.get(owner.pod, owner.pod)
    if owner.container in names and names[owner.container][0] == owner.pod:
        return uid, names[owner.container][1]
    only = [key for key, uuid in rows if key[0] == uid and uuid == card.uuid]
    return only[0] if len(only) == 1 else None


def _filled(row: ContainerUse, of_card: _OfCard | None) -> ContainerUse:
    """Return the row with what its processes use. Without processes, that is nothing; if they are unknown, so is it."""
    if of_card is None:
        return row
    total = of_card.containers.get(row.key, Sum())
    return replace(row, memory=total.memory, sm=total.sm)


def _with_measured(row: ContainerUse, measured: Measured | None) -> ContainerUse:
    if measured is None:
        return row
    memory = row.memory if measured.memory is None else measured.memory
    return replace(row, memory=memory, sm=row.sm if measured.sm is None else measured.sm)


def _card_usage(card: Card, reading: CardReading | None, of_card: _OfCard | None) -> CardUsage:
    found = CardUsage(card) if reading is None else CardUsage(card, reading.memory, reading.sm)
    if of_card is None:
        return found
    total = Sum()
    for process in of_card.foreign:
        total.add(process.memory, process.sm)
    return replace(found, foreign=len(of_card.foreign), foreign_memory=total.memory)
