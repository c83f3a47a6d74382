"""Computes what resized pods have freed of the resources that stand for memory.

The kubelet and the schedulers go on counting what a pod requests, whatever size its share has now. Without the
difference the node would have too little of the resource, although its cards have room, and the kubelet would fail the
pods that mgpu places there. So the agent offers the difference in addition to what the cards have. `NodeState` passes
it on to `inventory.reporter`, which writes the node status, and to `deviceplugin.advertised_resources`, which offers
device ids. The functions are pure.
"""

from collections.abc import Iterable, Sequence

from deviceplugin.pods.gpu_pod import GpuPod
from mgpu.model.cards import Card
from mgpu.model.ledger import Share
from mgpu.model.resizing import RESIZED, is_resizable


def freed_amount(resource: str, pods: Iterable[GpuPod], cards: Sequence[Card]) -> int:
    """Return how much of the resource pods request beyond the limits of their shares.

    While a limit is being lowered, this is more than what the ledger has freed: the node must offer the difference
    before the scheduler places pods there. Parts of a unit are rounded up, since the cards decide whether a pod fits.

    Args:
        resource: A resource that stands for memory (`NodeResource.of_memory`).
        cards: The GPUs of the node.
    """
    return sum(
        _freed(amount, container.name, gpu_pod, cards)
        for gpu_pod in pods
        if RESIZED in gpu_pod.pod.annotations and not gpu_pod.pod.ended
        for container, amount in gpu_pod.containers_requesting(resource)
    )


def _freed(amount: int, container: str, gpu_pod: GpuPod, cards: Sequence[Card]) -> int:
    shares: Sequence[Share] = [s for s in gpu_pod.limited_shares or () if s.container == container and is_resizable(s)]
    places = [(share, card) for share in shares for card in cards if share.is_on(card)]
    requests = gpu_pod.container_requests(container)
    requested = sum(requests[0].amount_on(card).memory for _, card in places) if requests else 0
    limit = sum(share.amount(card).memory for share, card in places)
    return -(-amount * (requested - limit) // requested) if limit < requested else 0
