"""Finds out what the containers of a claim's pods reference, and whether variables can name all of their cards.

The functions are pure. `claim_views` explains why a container with several references is a problem.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from deviceplugin.dra.claim_users import ClaimPod, Reference
from deviceplugin.dra.claim_views import WHOLE_CLAIM
from mgpu.model.resource_claims import Claim, base_request

_REMEDY = (
    "but NVIDIA_VISIBLE_DEVICES names the cards of one reference only: let it reference one whole claim, or set "
    "deviceplugin.deviceList: mounts or deviceplugin.deviceNodes: true"
)


def conflict(
    name: str,
    requests: Collection[str],
    users: Sequence[ClaimPod],
    others: Collection[str],
    has_pods_cards: Callable[[str, str], bool],
) -> str | None:
    """Return why a container that uses the claim would not see exactly its cards; None if all containers do.

    Args:
        name: The name of the claim.
        requests: Its requests that have cards, as containers reference them.
        users: The pods that use the claim.
        others: The names of the other claims of the namespace that mgpu has prepared on this node.
        has_pods_cards: A function that returns whether a container, given by the UID of its pod and by its name,
            also requests GPUs without a claim.
    """
    for pod in users:
        for container, references in sorted(pod.references.items()):
            own = _own(name, requests, references)
            if not own or pod.ended:
                continue
            found = [f"{name}/{request}" if request else name for request in own]
            found += sorted({reference.claim for reference in references} & {*others})
            texts = [f"ResourceClaim {one}" for one in found]
            if has_pods_cards(pod.uid, container):
                texts.append("GPUs without a claim")
            if len(texts) > 1:
                return f"container {container} of pod {pod.name} uses {', '.join(texts)}, {_REMEDY}"
    return None


def used_views(claim: Claim, users: Sequence[ClaimPod], views: Sequence[str]) -> tuple[str, ...]:
    """Return the views that containers may have, in the order of `views`.

    If the claim belongs to one pod, these are the views of its containers. Later pods may use any other claim. A
    container that references the whole claim gets the CDI devices of all views.
    """
    used = {_view_of(request, views) for request in _references(claim, users)}
    if not claim.owner or views[-1] in used:
        return tuple(views)
    return tuple(view for view in views if view in used)


def is_view_shared(claim: Claim, users: Sequence[ClaimPod], view: str) -> bool:
    """Return whether several containers may have the view, or see some of its cards by another view."""
    if not claim.owner:
        return True
    return sum(view in (request, WHOLE_CLAIM) or not request for request in _references(claim, users)) > 1


def _references(claim: Claim, users: Sequence[ClaimPod]) -> Iterator[str]:
    """Yield the requests that the containers reference; "" for the whole claim."""
    requests = requests_of(claim)
    for pod in users:
        for references in pod.references.values():
            yield from _own(claim.name, requests, references)


def requests_of(claim: Claim) -> frozenset[str]:
    """Return the requests of an allocated claim that have cards, as containers reference them."""
    return frozenset(base_request(result.request) for result in claim.results)


def _own(name: str, requests: Collection[str], references: Sequence[Reference]) -> tuple[str, ...]:
    """Return the requests of the claim that a container references, each once; "" for the whole claim."""
    found = (r.request for r in references if r.claim == name and (not r.request or r.request in requests))
    return tuple(dict.fromkeys(found))


def _view_of(request: str, views: Sequence[str]) -> str:
    return request or views[-1]
