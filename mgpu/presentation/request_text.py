"""Describes in words a GPU request, how its cards are chosen, and which scheduling gates the pod waits for.

The wording may change, because no program parses it. Mainly `mgpu explain` and the scheduler's web page show these
texts.
"""

from collections.abc import Iterable

from mgpu import dialects
from mgpu.model.cards import GPU, noun
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.pods import Stage
from mgpu.model.quantities import format_bytes, format_core
from mgpu.model.slice_names import is_slice
from mgpu.settings import Settings

_KNOWN_GATES = {
    "kueue.x-k8s.io/admission": "Kueue has not admitted it; its Workload has the reason",
    "kueue.x-k8s.io/topology": "Kueue has not assigned its topology domain",
}


def describe_request(request: GpuRequest) -> str:
    """Return the request of all containers, such as `train: 60% and 16.0 GiB of one card; evaluate: …`."""
    return "; ".join(f"{name}: {amount}" for name, amount in describe_containers(request))


def describe_containers(request: GpuRequest) -> list[tuple[str, str]]:
    """Return a pair such as (`init warm`, `60% and 16.0 GiB of one card`) for each container and type of device."""
    return [(f"{_role(c)}{c.container}", _amount(c)) for c in (*request.containers, *request.others)]


def describe_policy(request: GpuRequest, settings: Settings) -> str:
    """Return a text that says which cards are chosen among those that fit."""
    if all(c.whole for c in request.containers):
        return "whole cards must be idle"
    policy = dialects.card_policy(request, settings)
    return {
        "binpack": "binpack: as full as possible, so that other cards stay free",
        "spread": "spread: as even as possible",
        "bestfit": "best fit: the least free memory that is enough",
        "minor": "the first cards that fit, by minor number",
    }.get(policy, policy)


def describe_gates(gates: Iterable[str]) -> str:
    """Return the names of the scheduling gates, each with its meaning if that is known."""
    return ", ".join(f"{gate} ({_KNOWN_GATES[gate]})" if gate in _KNOWN_GATES else gate for gate in gates)


def _role(container: ContainerRequest) -> str:
    return {Stage.INIT: "init ", Stage.SIDECAR: "sidecar "}.get(container.stage, "")


def _amount(container: ContainerRequest) -> str:
    kind = noun(container.type) if container.type == GPU or is_slice(container.type) else container.type
    cards = f"one {kind}" if container.cards == 1 else f"{container.cards} {kind}s"
    if is_slice(container.type):
        return cards
    if container.whole:
        return f"{cards}, whole"
    memory = [format_bytes(container.memory)] if container.memory else []
    memory += [f"{container.ratio}% of the memory"] if container.ratio else []
    amounts = [format_core(container.core)] * bool(container.core) + memory
    of = "of" if container.cards == 1 else "of each of"
    return f"{' and '.join(amounts)} {of} {cards}"
