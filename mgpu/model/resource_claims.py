"""Defines what ResourceClaims (Dynamic Resource Allocation) request of mgpu's driver, and what they hold of its cards.

A ResourceClaim requests devices of any drivers. mgpu serves the devices of the driver `gpu.mgpu.io`: a device is a
card of a node, of which each allocation result is a share, or a MIG instance (`mig_devices`). The scheduler, the agent,
the commands and the playground read claims with `claim_object.read_claim` (docs/design/dra.md).

Amounts follow the model of mgpu: the capacity `cores` is in percent of a card in the API and in milli here, and the
capacity `memory` is in bytes.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from mgpu.model.cards import WHOLE_CORE, WHOLE_RATIO, Card
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig_devices import MigDevice, read_mig_device, share_of_instance
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.quantities import quantity_of_bytes

DRIVER = "gpu.mgpu.io"
"""The name of mgpu's DRA driver."""
DRA = "dra"
"""The name that stands for claims where a request or a holding names its vocabulary."""
API = "resource.k8s.io/v1"
CLAIMS = f"/apis/{API}/resourceclaims"
CLASSES = f"/apis/{API}/deviceclasses"
SLICES = f"/apis/{API}/resourceslices"

MARK = "mgpu.io/claims"
"""The resource that marks pods with claims for kube-scheduler's extender. Its amount is always 0."""

CORES = "cores"
MEMORY = "memory"
MILLI_PER_PERCENT = WHOLE_CORE // 100
MAX_RESULTS = 32
"""The most results of an allocation, and the most requests of a claim, in Kubernetes."""
LEAST_MEMORY = 1 << 20
"""The least memory of a share in bytes."""

PREPARED = "Prepared"
"""The type of the condition in `status.devices` that the agent sets to True when it has delivered a device. From then
on the allocation must not be replaced."""
REPAIR = "mgpu.io/repair"
"""The annotation of a claim whose allocation mgpu is replacing. It lets another replica finish the repair: its value is
the JSON of the new `status.allocation` and of `status.reservedFor`, which is the same as before."""

_DEVICE_PREFIX = "card-"
_LONGEST_DEVICE = 63
"""The API server allows no longer names, but the webhook gets objects that are not validated yet."""


def claim_path(namespace: str, name: str) -> str:
    """Return the path of a ResourceClaim in the API."""
    return f"/apis/{API}/namespaces/{quote(namespace, safe='')}/resourceclaims/{quote(name, safe='')}"


def is_newer(version: str, other: str) -> bool:
    """Return whether a resourceVersion is later than another one of the same object.

    Resource versions are decimal integers (KEP-5504). A version of another form counts as newer.
    """
    if not (version.isdecimal() and other.isdecimal()):
        return True
    return int(version) > int(other)


def device_name(index: int) -> str:
    """Return the name of the DRA device for the card with this index."""
    return f"{_DEVICE_PREFIX}{index}"


def card_index(device: str) -> int | None:
    """Return the index of the card that a DRA device stands for, or None if the name is not one of mgpu's."""
    digits = device.removeprefix(_DEVICE_PREFIX)
    if (
        device == digits
        or len(device) > _LONGEST_DEVICE
        or not digits.isascii()
        or not digits.isdigit()
        or str(int(digits)) != digits
    ):
        return None
    return int(digits)


def base_request(name: str) -> str:
    """Return the name by which containers and constraints refer to a request: that of `gpu/small` is `gpu`."""
    return name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One request of a claim, or one alternative of a request with `firstAvailable`.

    Attributes:
        name: the name as in allocation results: `gpu`, or `gpu/small` for an alternative.
        device_class: the name of the DeviceClass.
        count: the number of devices; 0 for `allocationMode: All`, and at most `MAX_RESULTS` + 1, since more are never
            allocated, and the API server accepts any number.
        core: the requested core of each device, in milli; None if the request names no `cores`.
        memory: the requested memory of each device, in bytes; None if the request names no `memory`.
        selectors: the CEL expressions that each device must fulfill, besides those of the class.
        admin: whether the request has `adminAccess`. Its devices are not reserved for the claim.
    """

    name: str
    device_class: str = ""
    count: int = 1
    core: int | None = None
    memory: int | None = None
    selectors: tuple[str, ...] = ()
    admin: bool = False

    @property
    def whole(self) -> bool:
        """Whether the request is for whole cards: it states no capacity, so that the default applies, which is all."""
        return self.core is None and self.memory is None


@dataclass(frozen=True, slots=True)
class AttributeConstraint:
    """A constraint between the devices of a claim.

    Attributes:
        requests: the names of the requests that the constraint concerns; () for all.
        attribute: the fully qualified name of the attribute, such as `gpu.mgpu.io/model`.
        distinct: whether the values must be different (`distinctAttribute`) and not equal (`matchAttribute`).
    """

    requests: tuple[str, ...]
    attribute: str
    distinct: bool = False

    def concerns(self, request: str) -> bool:
        """Return whether the constraint concerns a request, which may be an alternative such as `gpu/small`."""
        return not self.requests or request in self.requests or base_request(request) in self.requests


@dataclass(frozen=True, slots=True)
class Result:
    """One allocation result of mgpu's driver.

    Attributes:
        position: its position in `status.allocation.devices.results`, which also has the results of other drivers.
        request: the name of its request (`DeviceRequest.name`).
        pool: the name of the pool, which is that of the node.
        device: the name of the device (`device_name`, or that of a MIG instance).
        share_id: the identifier of the share, or "" for a device that is not shared.
        core, memory: the consumed capacity, in milli and bytes; None where the result states none.
        admin: whether the result has `adminAccess`.
    """

    position: int
    request: str
    pool: str
    device: str
    share_id: str = ""
    core: int | None = None
    memory: int | None = None
    admin: bool = False

    @property
    def mig_device(self) -> MigDevice | None:
        """The MIG instance that the result stands for; None for a share of a card."""
        return read_mig_device(self.device)


@dataclass(frozen=True, slots=True)
class Consumer:
    """An entry of `status.reservedFor`: in most cases a pod that may use the claim."""

    resource: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A ResourceClaim, as far as it concerns mgpu's driver.

    Attributes:
        version: the resourceVersion.
        created: the creation time as in the object.
        requests: all requests, each alternative of a `firstAvailable` as one.
        constraints: the constraints between devices, in the order of the claim.
        card_constraints: what the annotations `mgpu.io/…` of the claim require of its cards.
        allocated: whether the claim has an allocation, of whatever driver.
        results: the results of mgpu's driver, in the order of the allocation.
        consumers: who may use the claim.
        owner: the UID of the pod for which the claim was created from a template, or "".
        prepared: the devices that the agent has delivered, each as pool, device and share id.
        repair: the value of the annotation `REPAIR`, or "".
    """

    uid: str
    namespace: str
    name: str
    version: str = ""
    created: str = ""
    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[AttributeConstraint, ...] = ()
    card_constraints: Constraints = NO_CONSTRAINTS
    allocated: bool = False
    results: tuple[Result, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    owner: str = ""
    deleting: bool = False
    prepared: frozenset[tuple[str, str, str]] = frozenset()
    repair: str = ""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def node(self) -> str:
        """The node whose cards the claim has; "" if mgpu's driver serves no result of it.

        kube-scheduler takes all devices of pools with a `nodeName` from one node.
        """
        return self.results[0].pool if self.results else ""

    @property
    def is_prepared(self) -> bool:
        """Whether any of the present results was delivered to a node's containers."""
        return any((r.pool, r.device, r.share_id) in self.prepared for r in self.results)

    def request(self, name: str) -> DeviceRequest | None:
        return next((request for request in self.requests if request.name == name), None)


def gpu_request(claim: Claim) -> GpuRequest:
    """Return what the results of a claim request of the cards of a node.

    The result has one "container" for each request of the claim, which is named as the request. A request for several
    cards gets different cards. A request without capacity is for whole cards. If it states only one of the two
    amounts, the default of the other one applies, which is all of the card. If both amounts are 0, a least share
    counts: kube-scheduler raises the memory to its minimum except on a full card, on which nothing would always fit,
    although the claim shows the card to its containers. MIG instances are requests for devices of other types, one for
    each profile. Administrative access holds nothing.
    """
    counts: dict[str, int] = {}
    instances: dict[tuple[str, str], int] = {}
    for result in claim.results:
        device = result.mig_device
        if result.admin:
            continue
        if device is None:
            counts[result.request] = counts.get(result.request, 0) + 1
        else:
            key = (device.type, result.request)
            instances[key] = instances.get(key, 0) + 1
    containers = []
    for name, count in counts.items():
        results = [r for r in claim.results if r.request == name and r.mig_device is None and not r.admin]
        containers.append(_container(name, count, claim.request(name), _largest(results)))
    others = tuple(
        ContainerRequest(name, count, core=WHOLE_CORE, whole=True, type=type)
        for (type, name), count in sorted(instances.items(), key=lambda row: row[0][0])
    )
    return GpuRequest(DRA, tuple(containers), constraints=claim.card_constraints, others=others)


def _largest(results: Sequence[Result]) -> Result:
    """Return a result with the largest amounts of several results of one request.

    kube-scheduler gives all results of a request the same amounts, but others may write allocations, too.
    """
    cores = [result.core for result in results if result.core is not None]
    memories = [result.memory for result in results if result.memory is not None]
    return replace(
        results[0],
        core=max(cores) if len(cores) == len(results) else None,
        memory=max(memories) if len(memories) == len(results) else None,
    )


def _container(name: str, count: int, request: DeviceRequest | None, result: Result) -> ContainerRequest:
    if request is None:
        core = result.core
        memory = result.memory
    else:
        core = result.core if request.core is not None else None
        memory = result.memory if request.memory is not None else None
    if core is None and memory is None:
        return ContainerRequest(name, count, core=WHOLE_CORE, whole=True)
    if core == 0 and memory == 0:
        return ContainerRequest(name, count, core=MILLI_PER_PERCENT, memory=LEAST_MEMORY)
    ratio = WHOLE_RATIO if memory is None else None
    return ContainerRequest(name, count, core=WHOLE_CORE if core is None else core, memory=memory or 0, ratio=ratio)


def requests_before_allocation(claim: Claim, names: Collection[str]) -> GpuRequest:
    """Return what a claim without an allocation requests with these of its requests.

    A request for all devices (`allocationMode: All`) counts as one for a single card, because their number depends on
    the node.
    """
    chosen = [request for request in claim.requests if request.name in names and not request.admin]
    containers = []
    for request in chosen:
        result = Result(0, request.name, "", "", core=request.core, memory=request.memory)
        containers.append(_container(request.name, max(1, request.count), request, result))
    return GpuRequest(DRA, tuple(containers), constraints=claim.card_constraints)


def claim_holding(claim: Claim) -> Holding | None:
    """Return what an allocated claim holds; None if it holds nothing of mgpu's driver.

    A result whose device name is not one of mgpu's counts on no card. A MIG instance is a share of a device of its own
    type.
    """
    shares = tuple(_shares(claim))
    if not shares:
        return None
    return Holding(claim.uid, claim.namespace, claim.name, claim.node, DRA, shares, constraints=claim.card_constraints)


def _shares(claim: Claim) -> Iterator[Share]:
    requests = {container.container: container for container in gpu_request(claim).containers}
    for result in claim.results:
        device = result.mig_device
        if device is not None and not result.admin:
            yield share_of_instance(result.request, device)
            continue
        index = card_index(result.device)
        one = requests.get(result.request)
        if result.admin or index is None or one is None:
            continue
        yield Share(result.request, index, one.core, one.memory, one.whole, ratio=one.ratio)


def consumed_capacity(request: ContainerRequest, card: Card) -> dict[str, str]:
    """Return `consumedCapacity` of an allocation result for one card of a request, as quantities."""
    amount = request.amount_on(card)
    cores = -(-amount.core // MILLI_PER_PERCENT)
    return {CORES: str(cores), MEMORY: quantity_of_bytes(amount.memory)}
