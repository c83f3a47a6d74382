"""The admission rules for the annotation `mgpu.io/resize` of a pod.

`webhook.pod_rules` calls them for new pods, and for updates that change the annotation. The scheduler checks the same
limits again when it decides the resize, and those that depend on the pod's cards.
"""

from collections.abc import Iterator

from mgpu.model.errors import BadObject, Problem, Rule
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.pods import Pod, Stage
from mgpu.model.quantities import format_bytes
from mgpu.model.raw_objects import annotation_path
from mgpu.model.resizing import RESIZE, read_wanted
from mgpu.settings import Settings

_PATH = annotation_path(RESIZE)


def resize_problems(pod: Pod, request: GpuRequest | None, settings: Settings) -> Iterator[Problem]:
    """Yield the problems with the wanted amounts of a pod.

    Args:
        request: the pod's request; None if it cannot be read or its vocabulary is disabled.
    """
    text = pod.annotations.get(RESIZE)
    if text is None or request is None:
        return
    if settings.scheduler.resize == "none":
        yield Problem(_PATH, "has no effect, because resizing is turned off (scheduler.resize)", Rule.OTHER)
        return
    try:
        wanted = read_wanted(text)
    except BadObject as error:
        yield from error.problems
        return
    requests = {container.container: container for container in request.containers}
    for name, amount in wanted.items():
        message = _problem(requests.get(name), amount, is_limited=settings.scheduler.resize == "within-request")
        if message:
            yield Problem(_PATH, f"container {name[:63]!r} {message}", Rule.TOO_MUCH)


def _problem(request: ContainerRequest | None, amount: int, *, is_limited: bool) -> str | None:
    """Return why the container cannot have this amount of memory, or None."""
    if request is None:
        return "does not exist or requests no share of a card"
    if request.whole:
        return "requests whole cards, which cannot be resized"
    if request.stage is Stage.INIT:
        return "is an init container, which cannot be resized"
    if is_limited and request.memory and amount > request.memory:
        return f"requests {format_bytes(request.memory)} of each card, and may not have more (scheduler.resize)"
    return None
