"""Expresses the GPU request of a pod as requests of one ResourceClaim.

A pod gets one claim with a request for each GPU container, so that its cards are decided together. Only shares of GPUs
and whole GPUs can be expressed. The functions are pure; `webhook.pod_conversion` calls them.

A claim holds all of its devices until the pod ends, while containers of a vocabulary that run one after another hold
only the most that they need at any time. So an init container uses the request of an app container, or that of an
earlier init container, if that is at least as large: neither runs beside it. Otherwise it gets a request of its own. A
sidecar runs beside the init containers that follow it, so they never use its request.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mgpu.model.converted_requests import ConvertedRequest
from mgpu.model.errors import Problem, raise_if_any
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.pods import Pod, Stage
from mgpu.model.resource_claims import MAX_RESULTS, MILLI_PER_PERCENT
from mgpu.settings import Settings

_MIB = 1 << 20
_KEEP = "label the pod mgpu.io/dra: keep to leave it to the device plugin"


@dataclass(frozen=True, slots=True)
class ClaimRequests:
    """The requests of the claim of one pod.

    Attributes:
        by_container: the name of the request that each GPU container uses.
        held_longer: the init containers with requests of their own, which the pod holds until it ends.
    """

    requests: tuple[ConvertedRequest, ...]
    by_container: Mapping[str, str]
    held_longer: tuple[str, ...] = ()


def claim_requests(pod: Pod, request: GpuRequest, settings: Settings) -> ClaimRequests:
    """Return the requests of the claim. Raises BadObject if a claim cannot express what the pod requests."""
    paths = {container.name: container.path for container in pod.containers}
    card_memory = settings.dra.convert_card_memory * _MIB
    problems = [*_other_problems(request, paths)]
    problems += (
        Problem(
            f"{paths[one.container]}.resources",
            "requests a percentage of a card's memory, but a claim requests bytes; request bytes, or ask the "
            f"administrator to set dra.convertCardMemory, or {_KEEP}",
        )
        for one in request.containers
        if _is_percentage(one) and not card_memory
    )
    raise_if_any(problems)
    found = _share_with_init_containers(request, card_memory)
    cards = sum(one.cards for one in found.requests)
    if cards > MAX_RESULTS:
        text = f"request {cards} cards, but a claim may have at most {MAX_RESULTS}; split the pod, or {_KEEP}"
        raise_if_any([Problem("spec.containers", text)])
    return found


def _other_problems(request: GpuRequest, paths: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems with what a claim cannot express at all.

    The pod is denied instead of being left as it is: a cluster that converts pods may have no device plugin, so the
    pod would wait without an end, and only the rest of it would be converted if it requests cards too.
    """
    for other in request.others:
        text = f"requests {other.type}, which mgpu cannot serve by a claim; {_KEEP}"
        yield Problem(f"{paths[other.container]}.resources", text)
    if request.isolation:
        text = f"asks for isolation by {request.isolation}, which a claim cannot ask for; leave it out, or {_KEEP}"
        yield Problem("metadata.labels", text)


def _is_percentage(one: ContainerRequest) -> bool:
    return not one.whole and bool(one.ratio) and not one.memory


def _share_with_init_containers(request: GpuRequest, card_memory: int) -> ClaimRequests:
    requests = {one.container: _converted(one, card_memory) for one in request.containers}
    stages = {one.container: one.stage for one in request.containers}
    reusable = [requests[name] for name, stage in stages.items() if stage is Stage.APP]
    used: dict[str, str] = {}
    held_longer: list[str] = []
    for name, stage in stages.items():
        used[name] = name
        if stage is not Stage.INIT:
            continue
        larger = next((other for other in reusable if _covers(other, requests[name])), None)
        if larger is None:
            held_longer.append(name)
            reusable.append(requests[name])
        else:
            used[name] = larger.name
    own = tuple(one for name, one in requests.items() if used[name] == name)
    return ClaimRequests(own, used, tuple(held_longer))


def _converted(one: ContainerRequest, card_memory: int) -> ConvertedRequest:
    if one.whole:
        return ConvertedRequest(one.container, one.cards)
    memory = one.memory
    if _is_percentage(one):
        # kube-scheduler rounds up to whole MiB. Rounded down here, two halves of a card still fit on it.
        memory = (one.ratio or 0) * card_memory // 100 // _MIB * _MIB
    return ConvertedRequest(one.container, one.cards, -(-one.core // MILLI_PER_PERCENT), memory)


def _covers(large: ConvertedRequest, small: ConvertedRequest) -> bool:
    """Return whether a container may use the larger request in place of its own.

    A share without compute is not limited in its use of compute, so one with compute cannot replace it.
    """
    if large.cards != small.cards:
        return False
    if large.cores is None or large.memory is None:
        return True
    if small.cores is None or small.memory is None:
        return False
    has_compute = large.cores >= small.cores > 0 or large.cores == small.cores == 0
    return has_compute and large.memory >= small.memory
