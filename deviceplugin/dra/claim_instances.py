"""The MIG instances of a claim while it is prepared: what they wait for, and the devices that containers get.

`claim_preparation` calls this module. `mig_instances` creates the instances.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from deviceplugin.dra.mig_instances import MigInstances
from deviceplugin.pods.capacity_check import Grants, holding
from deviceplugin.pods.gpu_pod import GpuPod
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.mig_devices import mig_card_states, offer_of
from mgpu.model.node_slices import LABEL
from mgpu.model.resource_claims import Claim
from mgpu.model.slice_names import MIG_CLAIMS


def missing_reason(claim: Claim, gpus: Sequence[Card], mig_cards: Sequence[Card], *, delivered: bool) -> str | None:
    """Return why the instances of a claim cannot be created now, as far as that is known without NVML, or None.

    Args:
        gpus: All GPUs of the node.
        mig_cards: Those of which claims get instances.
        delivered: Whether the claim has its instances already. Then it keeps them, whatever the label of the node is.
    """
    for result in claim.results:
        device = result.mig_device
        if device is None:
            continue
        if result.admin:
            # A claim with administrative access holds nothing, so its instance would be destroyed under its containers.
            return f"mgpu does not support administrative access to a MIG instance ({result.device})"
        offer = offer_of(device, gpus)
        if offer is None:
            return f"this node has no device {result.device}"
        if not offer.card.healthy:
            return f"card {offer.card.index} ({offer.card.uuid}) is unhealthy"
        if not delivered and offer.card not in mig_cards:
            return f"claims get no MIG instances of this node's cards (label {LABEL}={MIG_CLAIMS})"
    return None


def overlap_reason(claim: Claim, gpus: Sequence[Card], others: Sequence[Holding]) -> str | None:
    """Return why the instances of a claim cannot exist beside one another and what others hold, or None.

    Args:
        others: What pods and other claims hold on the node. The text names none of them, since tenants read it.
    """
    wanted = [device for result in claim.results if not result.admin and (device := result.mig_device) is not None]
    states = {state.card.index: state for state in (mig_card_states(gpus, others) if wanted else ())}
    for device in wanted:
        state = states.get(device.card)
        if state is None or not state.has(device.instance):
            return f"there is no room for {device} beside what others hold of the card, or this claim itself"
        states[device.card] = state.with_instance(device.instance)
    return None


def started_pods(pods: Iterable[GpuPod], grants: Grants, cards: Sequence[Card]) -> Iterator[Holding]:
    """Yield what pods hold that have started. Records of other pods take no card from a claim (`capacity_check`)."""
    for gpu_pod in pods:
        has_started = bool(gpu_pod.started_containers) or grants.has_delivered(gpu_pod.pod.uid)
        if gpu_pod.shares is not None and has_started and not gpu_pod.pod.ended:
            yield holding(gpu_pod, cards)


async def create_instances(
    claim: Claim, gpus: Sequence[Card], instances: MigInstances | None, deadline: float
) -> tuple[Card, ...]:
    """Create the instances of a claim, and return them as devices with the UUIDs of the MIG devices.

    Args:
        deadline: The time of the event loop's clock until which NVML may take.

    Raises:
        RetryLater: An instance cannot be created now.
    """
    found = []
    try:
        async with asyncio.timeout_at(deadline):
            for result in claim.results:
                device = result.mig_device
                offer = offer_of(device, gpus) if device is not None else None
                if offer is None:
                    continue
                if instances is None:
                    raise RetryLater("the agent has no access to MIG")
                uuid = await instances.ensure(claim.uid, offer.card.uuid, offer.instance)
                found.append(replace(offer.as_card(), uuid=uuid))
    except TimeoutError as error:
        raise RetryLater("NVML does not answer in time") from error
    return tuple(dict.fromkeys(found))
